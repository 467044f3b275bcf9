"""Sampling strategies: what a step trains on; one brick a file.

A strategy is called by the trainer before every step:

    leases = await strategy(buffer, num, step=step, max_staleness=max_staleness)

`num` entries make a step, `step` steps are done, and `max_staleness` is what the run allows sampled experience to be
behind (`sync.max_staleness`). It returns leases, fewer than `num` when there are no more, and none when the run is
over; every one that it does not return it gives back, drops or acknowledges. It keeps nothing: what it does depends on
the step and the store, so a resumed run goes on alike. `Leases.metrics` go to the monitor.

Beside its fields a strategy says

* `fresh_ratio`: the share of `num` that newly sampled groups make up, over the steps. Admission lets so many in
  (`(version + max_staleness + 1) x fresh`); a strategy that leases more is refused when it does.
* `buffers`: names of the buffers it leases from. `main` holds what is sampled for the run, `expert` the answers that
  the section `expert` of the run file names; others were filled before.
* `is_timed`: whether its choice depends on what has arrived when it is asked; refused with `deterministic: true`.
* `fixes_order` (default False): it asks for an order of its own, so `buffer.priority` would have no effect; refused.
* `check(where)`, `check_step(where, num)`: raise ConfigError for fields that do not fit each other, or the step's size.
"""
