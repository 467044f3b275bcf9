"""Priorities: which of the entries that wait are trained on first; one brick a file.

A priority is called once for every entry it may choose from, at every lease:

    score = priority(candidate)

and the highest score goes first, ties by age. It sees a `Candidate`: the stored priority, reward, advantage, staleness,
uses, uses of the same task, source, seconds waited and the step, never the records. A function of a user's own is named
by its import path, `buffer: {priority: my_module:my_priority}`.

Beside its fields a priority says

* `windows`: the orders (`priority`, `age`, `newest`, `reward`, `advantage`) of which the first entries are what it
  chooses from: eight times as many as are leased, at least 64, of each. An index keeps these orders, so a lease costs
  the same however many entries wait. Without it `priority` and `newest` are taken. With more waiting than a window
  holds, the choice is exact where the entry it wants is among the first of one of these orders.

It keeps nothing: what it says depends on the candidate alone, so a resumed run goes on alike.
"""
