"""Which stage is named for what was measured of a guest's path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import shell_samples as samples

from vsrtune.core.cpuset import CpuSet
from vsrtune.model.guest import DATA_PLANE, Role
from vsrtune.model.load import Bottleneck, PathStage
from vsrtune.views.bottleneck import CpuLoad, Flow, bottleneck
from vsrtune.views.host_view import ThreadView, Use

GUEST = samples.guest()
(TAP,) = (i.target for i in GUEST.interfaces)
WORKER = f"vhost {TAP}/0"
IDLE = Use(0.1, 0.0)
FULL = Use(0.99, 0.0)


def views(uses: Mapping[str, Use], cpus: Mapping[str, int]) -> list[ThreadView]:
    """The guest's vcpu and worker on CPUs 1 and 2, with what they use."""
    found = []
    for role in DATA_PLANE:
        for thread in GUEST.by_role(role):
            cpu = cpus.get(role, 1 if role is Role.VCPU else 2)
            placed = replace(thread, last_cpu=cpu, affinity=CpuSet([cpu]))
            found.append(ThreadView(GUEST.ref, placed, uses.get(role, IDLE)))
    return found


def named(
    *,
    vcpu: Use = IDLE,
    vhost: Use = IDLE,
    lost: float = 0.0,
    missed: float = 0.0,
    arrived: float = 10_000.0,
    sent: float = 0.0,
    unsent: float = 0.0,
    cpus: Mapping[int, CpuLoad] | None = None,
    places: Mapping[str, int] | None = None,
) -> Bottleneck:
    flow = Flow(
        threads=views({"vcpu": vcpu, "vhost": vhost}, places or {}),
        arrived={TAP: arrived},
        sent={TAP: sent},
        lost={TAP: lost} if lost else {},
        missed={0: missed} if missed else {},
        unsent={"p0": unsent} if unsent else {},
        cpus=cpus or {},
    )
    return bottleneck(GUEST, flow)


def test_nothing_is_full() -> None:
    found = named()
    assert (found.stage, found.where, found.help, found.sure) == (
        PathStage.OUTSIDE, "", "nothing", True,
    )  # fmt: skip


def test_without_frames_a_busy_thread_limits_nothing() -> None:
    assert named(vcpu=FULL, arrived=0.0).stage is PathStage.OUTSIDE


class TestRing:
    def test_the_worker_is_full(self) -> None:
        found = named(vhost=FULL, lost=5000)
        assert (found.stage, found.where, found.sure) == (PathStage.RECEIVE, WORKER, True)
        assert found.help == "more queues, each with a worker and a CPU of its own"
        assert found.why == (
            f"the ring of {TAP} loses 5,000 frames/s; {WORKER} runs 99% and waits 0% of the time"
        )

    def test_the_worker_waits_for_its_cpu(self) -> None:
        others = CpuLoad(1.0, 0.0, (("other processes", 0.6), (f"{GUEST.ref} {WORKER}", 0.4)))
        found = named(vhost=Use(0.4, 0.6), lost=5000, cpus={2: others})
        assert (found.stage, found.where) == (PathStage.RECEIVE, WORKER)
        assert found.help == "a CPU of its own: CPU 2 also runs other processes (60%)"

    def test_a_worker_that_sleeps_gets_no_buffers_from_the_vcpu(self) -> None:
        found = named(vhost=Use(0.3, 0.1), vcpu=FULL, lost=5000)
        assert (found.stage, found.where) == (PathStage.VCPU, "vcpu 0")
        assert found.help == "nothing here: CPU 1 is full"

    def test_of_two_on_their_own_cpus_the_worker_is_the_limit(self) -> None:
        """It would sleep if the vcpu were the slower."""
        assert named(vhost=FULL, vcpu=FULL, lost=5000).stage is PathStage.RECEIVE

    @pytest.mark.parametrize(
        ("vcpu", "vhost", "stage"),
        [
            (Use(0.3, 0.7), Use(0.6, 0.4), PathStage.VCPU),
            (Use(0.6, 0.4), Use(0.3, 0.7), PathStage.RECEIVE),
        ],
    )
    def test_of_two_on_one_cpu_the_one_that_waits_longer(
        self, vcpu: Use, vhost: Use, stage: PathStage
    ) -> None:
        found = named(vhost=vhost, vcpu=vcpu, lost=5000, places={"vhost": 1})
        assert found.stage is stage

    def test_everybody_has_time_left(self) -> None:
        found = named(lost=5000)
        assert (found.stage, found.where, found.sure) == (PathStage.RING, TAP, False)
        assert found.help == "a longer queue (queue: macvtap)"

    def test_a_worker_that_got_no_cpu_at_all(self) -> None:
        """The kernel counts a wait when it ends."""
        full = {2: CpuLoad(1.0, 0.0, (("other processes", 0.99),))}
        found = named(vhost=Use(0.0, 0.0), lost=5000, cpus=full)
        assert (found.stage, found.where, found.sure) == (PathStage.RECEIVE, WORKER, False)

    def test_a_small_loss_is_no_limit(self) -> None:
        assert named(lost=49).stage is PathStage.OUTSIDE
        assert named(lost=51).stage is PathStage.RING

    def test_a_budget_that_is_used_up(self) -> None:
        use = Use(0.2, 0.1, 0.99)
        assert use.throttled
        found = named(vhost=use, lost=5000)
        assert (found.stage, found.help, found.sure) == (PathStage.RECEIVE, "a larger budget", True)

    def test_the_idle_vcpu_could_help(self) -> None:
        flow_views = views({"vcpu": FULL}, {})
        vcpu = next(v for v in flow_views if v.thread.role is Role.VCPU)
        second = replace(vcpu, thread=replace(vcpu.thread, index=1, last_cpu=3), use=IDLE)
        flow = Flow([*flow_views, second], {TAP: 10_000}, {TAP: 0}, {TAP: 5000}, {}, {}, {})
        assert bottleneck(GUEST, flow).help == "more queues: vcpu 1 could share the work"


class TestSending:
    def test_the_worker_that_sends(self) -> None:
        found = named(vhost=FULL, arrived=10, sent=9000)
        assert (found.stage, found.where) == (PathStage.TRANSMIT, WORKER)

    def test_a_device_cannot_send(self) -> None:
        found = named(unsent=3000)
        assert (found.stage, found.where) == (PathStage.OUTSIDE, "p0")
        assert found.help == "a faster link or receiver"


class TestInterrupts:
    def test_the_cpu_of_the_nic_is_full(self) -> None:
        found = named(missed=20_000, lost=10_000, cpus={0: CpuLoad(1.0, 0.97)})
        assert (found.stage, found.where, found.sure) == (PathStage.INTERRUPTS, "CPU 0", True)
        assert found.help == "another CPU for the NIC's interrupts, or more receive queues"

    def test_somebody_else_is_on_it(self) -> None:
        others = (("other processes", 0.7),)
        found = named(missed=20_000, cpus={0: CpuLoad(1.0, 0.3, others)})
        assert found.help.startswith("keep other processes off CPU 0")

    def test_the_ring_loses_more(self) -> None:
        found = named(missed=5_000, lost=20_000, vcpu=FULL, cpus={0: CpuLoad(1.0, 0.97)})
        assert found.stage is PathStage.VCPU


@pytest.mark.parametrize(
    ("uses", "stage"), [({"vcpu": FULL}, PathStage.VCPU), ({"vhost": FULL}, PathStage.RECEIVE)]
)
def test_a_full_thread_without_a_loss_is_not_sure(uses: dict[str, Use], stage: PathStage) -> None:
    found = named(**uses)
    assert (found.stage, found.sure) == (stage, False)
    assert found.why.startswith("no frame is lost yet")


@pytest.mark.parametrize(
    ("use", "stage"),
    [
        (Use(0.94, 0.0), PathStage.OUTSIDE),
        (Use(0.94, 0.02), PathStage.VCPU),
        (Use(0.1, 0.7), PathStage.VCPU),
    ],
)
def test_without_a_loss_a_vcpu_has_to_be_clearly_full(use: Use, stage: PathStage) -> None:
    """One that gets single frames needs much of its CPU for few of them."""
    assert named(vcpu=use).stage is stage
