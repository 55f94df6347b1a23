"""A step's thread sees the replicas as torch's default group; other threads, and everybody afterwards, the world."""

from __future__ import annotations

import threading

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_megatron.mesh.default_group import default_group, of_this_thread, whole_world


def test_only_the_thread_of_a_step_sees_another_default_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world, group = dist.group.WORLD, dist.new_group([0])
        seen: list[object] = []
        with default_group(group):
            assert dist.group.WORLD is group
            thread = threading.Thread(target=lambda: seen.append(dist.group.WORLD))
            thread.start()
            thread.join()
            joins = of_this_thread()

            def look() -> None:
                with joins():
                    seen.append(dist.group.WORLD)
                    with whole_world():
                        seen.append(dist.group.WORLD)

            thread = threading.Thread(target=look)  # which runs a part of the step
            thread.start()
            thread.join()
            assert dist.group.WORLD is group
            with default_group(world):
                assert dist.group.WORLD is world
            assert dist.group.WORLD is group
        assert seen == [world, group, world] and dist.group.WORLD is world
        assert type(distributed_c10d._world) is distributed_c10d._World, "nothing of torch stays changed"
    finally:
        dist.destroy_process_group()
