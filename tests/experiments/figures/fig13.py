"""Fig. 13: what connects the guest's interface with the NIC."""

from __future__ import annotations

from experiments.judge import causes, impossible, more
from experiments.plan import BASE, Claim, Figure, Run, fifo, policy

_RUN = "attachment"
_POLICY = fifo(10, 10)
_MACVTAP, _OVS, _BRIDGE, _USER = (
    policy("macvtap", _POLICY, attachment="macvtap"),
    policy("Open vSwitch", _POLICY, attachment="openvswitch"),
    policy("bridge", _POLICY, attachment="bridge"),
    policy("macvtap, no vhost", _POLICY, attachment="macvtap", vhost=False),
)

FIGURE = Figure(
    id="fig13",
    title="Fig. 13: macvtap, bridge, Open vSwitch",
    paper="macvtap forwards most, since it finds the guest by a table that never learns and has "
    "one device where the others have two; then come Open vSwitch, netmap and the bridge, "
    "in this order. netmap cannot use a third core, having no vhost thread, and suits hosts "
    "with few cores (Fig. 14).",
    ours="All with equal FIFO off the interrupt CPU. netmap is in neither Debian nor the kernel, "
    "so it is not measured. Virtio without vhost is added: the frames then pass through QEMU.",
    runs=(
        Run(
            _RUN, BASE, (_MACVTAP, _OVS, _BRIDGE, _USER),
            rates=(16000, 48000), pairs=9, seed=13,
            before=(("systemctl", "start", "openvswitch-switch"),),
            after=(("systemctl", "stop", "openvswitch-switch"),),
        ),
    ),
    claims=(
        Claim(
            "macvtap forwards more than the bridge.",
            more(_RUN, "macvtap", "bridge"),
            causes(_RUN, "macvtap", "bridge"),
        ),
        Claim(
            "macvtap forwards more than Open vSwitch.",
            more(_RUN, "macvtap", "Open vSwitch"),
            causes(_RUN, "Open vSwitch"),
        ),
        Claim(
            "Open vSwitch forwards more than the bridge.", more(_RUN, "Open vSwitch", "bridge")
        ),
        Claim("netmap forwards less than macvtap.", impossible("netmap cannot be had here")),
        Claim(
            "vhost forwards more than QEMU itself does (section 2).",
            more(_RUN, "macvtap", "macvtap, no vhost"),
            causes(_RUN, "macvtap, no vhost"),
        ),
    ),
)  # fmt: skip
