"""Run by test_breaking.py: a training that saves after each step, in which rank 1 breaks off, and which is resumed.

The arguments are a folder, and how the model is shared.
"""

import datetime
import functools
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks import join, leave
from tests.sharding import gathers
from tests.sharding.eight_bits import EIGHT
from tests.sharding.gathers import batch, full, loss_of, narrow
from tests.sharding.ranks import SIXTEEN

TIMEOUT = 8.0  # seconds, of collectives
STEPS = 5
BREAKS = {"killed": (1, "forward"), "raises": (3, "block"), "silent": (3, "step")}
"""Step and place: the other ranks wait in the decision, in a gather, in the search for infinities."""
SIZES = {"fsdp": 2, "fsdp4": 4, "hsdp": 4, "fp8": 2}
"""On how many ranks. Under HSDP rank 1 shares shards with rank 0, replicas with rank 3, and nothing with rank 2."""


def break_off(how, step, place):
    """What becomes of rank 1."""
    if BREAKS.get(how) != (step, place) or dist.get_rank() != 1:
        return
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("no such token")
    while not all(told(how, rank).exists() for rank in range(dist.get_world_size()) if rank != 1):
        time.sleep(0.1)
    os._exit(0)


def told(how, rank):
    """Where a rank notes the error that it got."""
    return FOLDER / f"{how}{rank}.json"


def mesh():
    """A mesh of several dimensions makes groups of its own, which would wait for half an hour."""
    if KIND != "hsdp":
        return init_device_mesh("cpu", (SIZE,))
    ranks = torch.arange(4).view(2, 2)
    both = [
        dist.new_subgroups_by_enumeration(rows.tolist(), datetime.timedelta(seconds=TIMEOUT))[0]
        for rows in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(both, "cpu", ranks, mesh_dim_names=("replicate", "shard"))


def last_saved(how):
    """The last checkpoint that is whole, by its step: what a rank wrote after others broke off has no metadata."""
    return max(path.parent for path in (FOLDER / how).glob("*/.metadata"))


class Training(gathers.Training):
    def __init__(self, how=""):
        bits = EIGHT if KIND == "fp8" else SIXTEEN
        self.how, self.step = how, 0
        make = functools.partial(bits.make, self.through)
        super().__init__(bits, make, gathers=torch.float16, low=torch.float16, lower="eager", mesh=mesh())

    def through(self, block, x):
        if block is self.model.blocks[1]:
            break_off(self.how, self.step, "block")
        return block(x)

    def go(self, first=0):
        """The weights and the scale after the last step."""
        for step in range(first, STEPS):
            self.step = step
            break_off(self.how, self.step, "forward")
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = self.run(batch(self.step))
            self.scaler.scale(loss_of(outputs)).backward()
            del outputs
            break_off(self.how, self.step, "step")
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.how:
                dcp.save(self.state(), checkpoint_id=FOLDER / self.how / str(self.step + 1))
        assert self.optimizer._ampcompile_step.reason is None
        assert len(narrow(self.decided.records())) == 10, str(self.decided)
        assert (KIND == "fp8") == ("f8" in {record.gathered_as for record in self.decided.records()})
        return [*map(full, self.model.parameters()), torch.tensor(self.scaler.get_scale())]


def train(rank, how):
    """What a rank does; all but rank 1 note the error that they got."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "RENDEZVOUS": str(FOLDER / f"meeting_{how}")}
    join(datetime.timedelta(seconds=TIMEOUT))
    if how == "resumed":
        wanted = Training().go()
        for broken in BREAKS:
            saved = last_saved(broken)
            found = Training().load(saved).go(int(saved.name))
            assert all(map(torch.equal, found, wanted)), broken
        leave()
    training = Training(how)
    try:
        training.go()
    except Exception as error:
        if rank == 1:
            raise
        told(how, rank).write_text(json.dumps({"error": str(error), "step": training.step, "at": time.time()}))
        os._exit(0)  # without a teardown, which needs the other ranks


def main():
    """Ranks are forked: most of a new process's time would go to imports. Writes how they ended."""
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    fork, ends = multiprocessing.get_context("fork"), {}
    for how in (*BREAKS, "resumed"):
        ranks = [fork.Process(target=train, args=(rank, how)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
            rank.kill()
            rank.join()
        ends[how] = [rank.exitcode for rank in ranks]
    (FOLDER / "ends.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
    SIZE = SIZES[KIND]
    main()
