"""Incarnations of a run: who may write, who is alive, who still waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

from triune.buffer.database import Database
from triune.errors import ConfigError, FencedError, StoreError, TaskError


@dataclass(frozen=True)
class Incarnation:
    """In whose name a call is made: a run, its epoch, and the one open buffer that calls."""

    run: str
    epoch: int
    owner: str


@dataclass(frozen=True)
class TrainerState:
    """How the process that opened a run is, as its explorers see it.

    Attributes:
        is_same: It is the incarnation they joined; another one has taken over where not.
        is_alive: Its heart beats.
        is_finished: It wants no more experience.
    """

    is_same: bool
    is_alive: bool
    is_finished: bool


class Runs:
    """Epochs, fencing, heartbeats and the two ends of a run."""

    def __init__(self, db: Database, lease_s: float) -> None:
        self.db, self.lease_s = db, lease_s

    def open(self, run: str, owner: str, config_hash: str, data_hash: str) -> Incarnation:
        """Begin the next epoch. An empty hash is not compared; that of a configuration is then the next one's to say.

        Raises:
            ConfigError: The run was started with another configuration.
            TaskError: The run was started with other tasks.
        """
        row = self.db.one("SELECT epoch, config_hash, data_hash FROM runs WHERE run = ?", (run,))
        if row is None:
            epoch = 0
            self.db.execute(
                "INSERT INTO runs(run, epoch, config_hash, data_hash, opener) VALUES (?, 0, ?, ?, ?)",
                (run, config_hash, data_hash, owner),
            )
        else:
            epoch = row[0] + 1
            where = f"run {run!r} in {self.db.where}"
            do = "resume with the same, or start a run of another name"
            if config_hash and row[1] and config_hash != row[1]:
                raise ConfigError(where, f"configuration {config_hash}", f"{row[1]}, with which it was started", do)
            if data_hash and row[2] and data_hash != row[2]:
                raise TaskError(where, f"task data {data_hash}", f"{row[2]}, with which it was started", do)
            self.db.execute(
                "UPDATE runs SET epoch = ?, config_hash = ?, data_hash = ?, ended = NULL, finished = NULL, opener = ?, "
                "is_settled = 0 WHERE run = ?",
                (epoch, config_hash, data_hash or row[2], owner, run),
            )
        who = Incarnation(run, epoch, owner)
        self.renew(who)
        self.db.touched |= {"runs", "slots", "entries", "versions"}
        return who

    def join(self, run: str, owner: str) -> Incarnation | None:
        """The incarnation that is running now; None while there is none alive, or it is not yet at its checkpoint."""
        row = self.db.one(
            "SELECT r.epoch FROM runs r JOIN owners o ON o.owner = r.opener "
            "WHERE r.run = ? AND o.expires > ? AND r.is_settled = 1",
            (run, self.db.now),
        )
        if row is None:
            return None
        who = Incarnation(run, row[0], owner)
        self.renew(who)
        return who

    def trainer(self, who: Incarnation) -> TrainerState:
        """How the process that opened the run is."""
        row = self.db.one(
            "SELECT r.epoch, o.expires, r.finished FROM runs r LEFT JOIN owners o ON o.owner = r.opener "
            "WHERE r.run = ?",
            (who.run,),
        )
        assert row is not None, "a run that was joined has its row"
        epoch, expires, finished = row
        is_alive = expires is not None and expires > self.db.now
        return TrainerState(is_same=epoch == who.epoch, is_alive=is_alive, is_finished=finished is not None)

    def settle(self, who: Incarnation) -> None:
        """The run stands at its checkpoint: others may join it."""
        self.db.execute("UPDATE runs SET is_settled = 1 WHERE run = ?", (who.run,))
        self.db.touched.add("runs")

    def check(self, who: Incarnation | None) -> Incarnation:
        """Raise FencedError when a newer incarnation owns the run; checked once per transaction."""
        if who is None:
            raise StoreError(self.db.where, "no run is open", "open_run or join_run before this call")
        if (who.run, who.epoch) not in self.db.verified:
            row = self.db.one("SELECT epoch FROM runs WHERE run = ?", (who.run,))
            if row is None or row[0] != who.epoch:
                newest = "none" if row is None else row[0]
                raise FencedError(
                    f"run {who.run!r} in {self.db.where}",
                    f"epoch {who.epoch} writes",
                    f"epoch {newest}, the newest incarnation",
                    "stop this process; another one has taken over",
                )
            self.db.verified.add((who.run, who.epoch))
        return who

    def renew(self, who: Incarnation) -> None:
        """Heartbeat: what this owner holds lives for another `lease_s`."""
        expires = self.db.now + self.lease_s
        self.db.execute(
            "INSERT INTO owners VALUES (?, ?, ?, ?) ON CONFLICT(owner) DO UPDATE SET epoch = excluded.epoch, "
            "run = excluded.run, expires = excluded.expires",
            (who.owner, who.run, who.epoch, expires),
        )
        self.db.execute(
            "UPDATE uses SET expires = ? WHERE consumer = ? AND owner = ? AND state = 'leased'",
            (expires, who.run, who.owner),
        )

    def num_owners(self, run: str) -> int:
        """Live processes that take part in the run."""
        row = self.db.one("SELECT count(*) FROM owners WHERE run = ? AND expires > ?", (run, self.db.now))
        return row[0] if row else 0

    def has_explorer(self, who: Incarnation) -> bool:
        """Whether anybody else takes or took part in this incarnation, or explored in an earlier one."""
        self.check(who)
        sql = (
            "SELECT 1 FROM runs WHERE run = :run AND admitted > 0 UNION ALL "
            "SELECT 1 FROM owners WHERE run = :run AND epoch = :epoch AND owner != :owner LIMIT 1"
        )
        return self.db.one(sql, {"run": who.run, "epoch": who.epoch, "owner": who.owner}) is not None

    def leave(self, who: Incarnation) -> None:
        """This owner is gone: others may take over what it held."""
        self.db.execute("UPDATE owners SET expires = 0 WHERE owner = ?", (who.owner,))
        self.db.touched.add("runs")

    def end(self, who: Incarnation, reason: str) -> None:
        """No more groups will come."""
        self.check(who)
        self.db.execute("UPDATE runs SET ended = ? WHERE run = ?", (reason, who.run))
        self.db.touched |= {"entries", "runs"}

    def finish(self, who: Incarnation, reason: str) -> None:
        """The trainer wants no more."""
        self.check(who)
        self.db.execute("UPDATE runs SET finished = ? WHERE run = ?", (reason, who.run))
        self.db.touched |= {"slots", "versions", "runs", "entries", "stock"}

    def has_ended(self, run: str) -> bool:
        """Whether no more groups will come."""
        row = self.db.one("SELECT ended IS NOT NULL OR finished IS NOT NULL FROM runs WHERE run = ?", (run,))
        return bool(row and row[0])

    def is_finished(self, run: str) -> bool:
        """Whether the trainer wants no more."""
        row = self.db.one("SELECT finished IS NOT NULL FROM runs WHERE run = ?", (run,))
        return bool(row and row[0])
