#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# napi_macvlan in network namespaces: what it delivers, what it counts, and what
# it survives. Needs root, python3, iproute2, ethtool; touches nothing outside
# the namespaces nmv-*, except that it loads and unloads the module.
#
#   netns nmv-a          netns nmv-b                      netns nmv-out
#   10.66.0.1            10.66.0.2                        10.66.0.9
#   +--------+           +--------+                       +-------+
#   |   a0   |           |   b0   |                       |  e0   |
#   +---+----+           +---+----+                       +--++---+
#       |  napi_macvlan      |                               ||
#   +---+--------------------+----------------------+        ||
#   |   +------------- l0 ----------- t0            |        ||
#   |                  ||          napi_macvtap     |        ||
#   |                  ||          /dev/tapN        |        ||
#   +------------------++---------------------------+        ||
#     netns nmv-host   ++======= veth =======================++
#
# Usage: netns.sh [FILE.ko]     else modprobe. CYCLES=1000 of creating and
# deleting, FLOOD_SECONDS=10 of a flood into rings that change their length,
# STEPS='traffic ring ...' to run only these. Exit status 0 when every step
# passed; the first that fails ends it. A step fails, too, when the kernel
# complains of itself meanwhile, in its log or by a new taint.

# $frames is two words, counters are numbers; `A && B || die` dies where either fails; until_true
# calls functions; sh -c gets its own text.
# shellcheck disable=SC2015,SC2016,SC2086,SC2329
set -u
here=$(dirname "$(readlink -f "$0")")
frames="python3 $here/frames.py"
module=${1:-}
cycles=${CYCLES:-1000}
flood_seconds=${FLOOD_SECONDS:-10}
steps=${STEPS:-traffic threaded modes passthru attributes ring bytes scan uplink busy
	broadcast changes lengths statistics cycles deletion unload}
tracing=/sys/kernel/tracing/instances/nmv
work=$(mktemp -d)
# What a line is written to starts a process that waits for it.
mkfifo "$work/go" "$work/release"
exec 8<>"$work/release" 9<>"$work/go"
jobs_started=()

say() { echo "netns.sh: $*"; }
die() { say "FAILED: $*" >&2; exit 1; }
in_ns() { local ns=nmv-$1; shift; ip netns exec "$ns" "$@"; }
# A process of ours in a namespace, in the background.
start() { local ns=nmv-$1; shift; ip netns exec "$ns" "$@" <&0 & jobs_started+=($!); }
stop_all() {
	[ ${#jobs_started[@]} -eq 0 ] && return
	kill "${jobs_started[@]}" 2>/dev/null
	wait "${jobs_started[@]}" 2>/dev/null
	jobs_started=()
}
clean() {
	stop_all
	for ns in a b host out; do ip netns del "nmv-$ns" 2>/dev/null; done
	[ ! -d $tracing ] || rmdir $tracing
	rm -rf "$work"
}
trap clean EXIT

load() {
	if [ -n "$module" ]; then modprobe tap; insmod "$module"; else modprobe napi_macvlan; fi ||
		die "the module does not load; see dmesg"
}

# stat NS DEVICE NAME: one counter
stat() { in_ns "$1" ethtool -S "$2" | awk -v n="$3:" '$1 == n { print $2 }'; }
# expect WHAT GOT OPERATOR WANTED
expect() { test "$2" "$3" "$4" || die "$1 is $2, expected $3 $4"; }
# until_true SECONDS COMMAND...
until_true() {
	local n=$(($1 * 10)); shift
	until "$@" 2>/dev/null; do
		[ $((n -= 1)) -gt 0 ] || return 1
		sleep 0.1
	done
}
# reaches NS DEVICE NAME COUNT: frames come when the SoftIRQ or the thread has run
at_least() { [ "$(stat "$1" "$2" "$3")" -ge "$4" ]; }
reaches() { until_true 30 at_least "$@" || die "$3 of $2 is $(stat "$1" "$2" "$3"), expected $4"; }
# trace EVENT: starts; then traced TEXT: how many lines have it, and ends
trace() {
	mkdir $tracing && echo 16384 >$tracing/buffer_size_kb && echo 1 >"$tracing/events/$1/enable" ||
		die "the tracepoint $1 cannot be used"
}
traced() {
	echo 0 >$tracing/tracing_on
	grep -c -- "$1" $tracing/trace
	rmdir $tracing
}
# threaded NS DEVICE 0|1
threaded() {
	in_ns "$1" sh -c "echo $3 >/sys/class/net/$2/threaded" || die "threaded cannot be set"
}
# begun FILE...: what writes to it is ready, on a machine however slow
begun() {
	local file
	for file; do until_true 60 test -s "$work/$file" || die "nothing is ready to write $file"; done
}
# Every frame that came is delivered or counted as lost, once the last has settled.
balance() { until_true 5 balanced "$1" "$2" || die "counters of $2 do not add up: $(balanced "$1" "$2")"; }
balanced() {
	in_ns "$1" ethtool -S "$2" | awk -v who="$2" '
		$1 == "rx_received:" { in_ = $2 }
		$1 == "rx_delivered:" { out = $2 }
		$1 ~ /^rx_dropped_/ && $1 != "rx_dropped_shrink:" { lost += $2 }
		END { if (in_ != out + lost) {
			print who ": received " in_ ", delivered " out ", lost " lost; exit 1 } }'
}

topology() {
	for ns in a b host out; do
		ip netns add "nmv-$ns" || die "cannot make namespaces; is this root?"
		in_ns $ns ip link set lo up
		# Nothing but the frames of the test.
		in_ns $ns sysctl -qw net.ipv6.conf.all.disable_ipv6=1 \
			net.ipv6.conf.default.disable_ipv6=1
	done
	lower
	devices
}
lower() {
	ip -n nmv-host link add l0 type veth peer name e0 netns nmv-out
	ip -n nmv-host link set l0 up
	ip -n nmv-out addr add 10.66.0.9/24 dev e0
	ip -n nmv-out link set e0 up
}
devices() {
	ip -n nmv-host link add a0 link l0 type napi_macvlan || die "no napi_macvlan"
	ip -n nmv-host link add b0 link l0 type napi_macvlan
	# The number makes a /dev/tapN that nobody has in another namespace.
	ip -n nmv-host link add t0 index 7066 link l0 type napi_macvtap || die "no napi_macvtap"
	ip -n nmv-host link set a0 netns nmv-a
	ip -n nmv-host link set b0 netns nmv-b
	ip -n nmv-a addr add 10.66.0.1/24 dev a0
	ip -n nmv-b addr add 10.66.0.2/24 dev b0
	up
}
up() {
	ip -n nmv-a link set a0 up || die "a0 does not come up"
	ip -n nmv-b link set b0 up || die "b0 does not come up"
	ip -n nmv-host link set t0 up || die "t0 does not come up"
}

# carries FROM TO ADDRESS COUNT [broadcast]: all of COUNT datagrams arrive
carries() {
	local got=$work/got
	in_ns "$2" $frames count 7000 "$4" 20 >"$got" & local reader=$!
	until_true 5 in_ns "$2" sh -c 'ss -Huln sport = :7000 | grep -q .' ||
		die "no reader in $2"
	in_ns "$1" $frames send "$3" 7000 "$4" ${5:+"$5"}
	wait $reader
	expect "datagrams from $1 to $2" "$(cat "$got")" -eq "$4"
}

test_traffic() {
	local before others
	before=$(stat a a0 tx_to_sibling); others=$(stat host t0 rx_forwarded)
	carries a b 10.66.0.2 500
	expect "tx_to_sibling of a0" $(($(stat a a0 tx_to_sibling) - before)) -ge 500
	expect "frames to b0 that t0 got" $(($(stat host t0 rx_forwarded) - others)) -lt 10
	before=$(stat a a0 rx_nic)
	carries out a 10.66.0.1 500
	expect "rx_nic of a0" $(($(stat a a0 rx_nic) - before)) -ge 500
	before=$(stat b b0 rx_broadcast); others=$(stat a a0 rx_broadcast)
	carries a b 10.66.0.255 200 broadcast
	expect "rx_broadcast of b0" $(($(stat b b0 rx_broadcast) - before)) -ge 200
	expect "broadcasts of a0 that it got itself" $(($(stat a a0 rx_broadcast) - others)) -lt 10
	carries a out 10.66.0.255 200 broadcast
	carries out b 10.66.0.255 200 broadcast
	balance a a0; balance b b0
}

test_threaded() {
	local said
	threaded b b0 1
	said=$(in_ns b $frames get b0 thread)
	expect "the thread's id" "$said" -gt 0
	grep -q '^napi/b0-' "/proc/$said/comm" || die "the thread told is not napi/b0-ID"
	carries a b 10.66.0.2 500
	carries a b 10.66.0.255 200 broadcast
	threaded b b0 0
	carries a b 10.66.0.2 500
	balance b b0

	# Newer kernels end a thread without the RTNL lock: its id is not read meanwhile.
	threaded b b0 1
	start a $frames flood 10.66.0.2 7001
	reaches b b0 rx_forwarded $(($(stat b b0 rx_forwarded) + 100))
	said=$(in_ns b $frames unthread b0)
	case $? in
	3) say "threaded: this kernel does not end single threads" ;;
	0) expect "the thread's id while the thread was ended" "$said" = "left out" ;;
	*) die "a thread cannot be ended" ;;
	esac
	stop_all
	threaded b b0 0
	carries a b 10.66.0.2 100
	balance b b0
}

test_modes() {
	local mac before
	in_ns a $frames mode a0 1 || die "mode private"
	before=$(stat b b0 rx_received)
	in_ns a $frames send 10.66.0.255 7000 50 broadcast
	# Others may have asked for an address meanwhile.
	expect "frames of a private device to a sibling" $(($(stat b b0 rx_received) - before)) -lt 10
	in_ns a $frames mode a0 4 || die "mode bridge"
	in_ns a $frames mode a0 8 2>/dev/null &&
		die "a device in use took mode passthru"
	carries a b 10.66.0.2 50
	ip -n nmv-a link add v0 link a0 type macvlan 2>/dev/null &&
		die "a macvlan of a device in mode bridge, which gets no frames"
	in_ns host $frames add napi_macvlan x0 l0 8 || die "passthru cannot be made"
	ip -n nmv-host link set x0 up 2>/dev/null && die "passthru beside others came up"
	ip -n nmv-a link set a0 down; ip -n nmv-b link set b0 down; ip -n nmv-host link set t0 down
	mac=$(in_ns host cat /sys/class/net/l0/address)
	ip -n nmv-host link set x0 address 02:00:00:00:66:77
	ip -n nmv-host addr add 10.66.0.3/24 dev x0
	ip -n nmv-host link set x0 up || die "passthru alone does not come up"
	ip -n nmv-host link set t0 up 2>/dev/null && die "came up beside passthru"
	expect "MAC of the lower device" "$(in_ns host cat /sys/class/net/l0/address)" = 02:00:00:00:66:77
	carries out host 10.66.0.3 100
	ip -n nmv-host link del x0
	expect "MAC of the lower device afterwards" "$(in_ns host cat /sys/class/net/l0/address)" = "$mac"
	up
}

promiscuity() { ip -n nmv-host -d link show "$1" | grep -o 'promiscuity [0-9]*'; }
test_passthru() {
	ip -n nmv-a link set a0 down; ip -n nmv-b link set b0 down; ip -n nmv-host link set t0 down
	in_ns host $frames add napi_macvlan x0 l0 8 || die "passthru cannot be made"
	ip -n nmv-host link set x0 address 02:00:00:00:66:77
	ip -n nmv-host link set x0 up || die "passthru alone does not come up"
	ip -n nmv-host link set l0 address 02:00:00:00:66:88
	expect "MAC of the device" "$(in_ns host cat /sys/class/net/x0/address)" = 02:00:00:00:66:88
	ip -n nmv-host link set x0 address 02:00:00:00:66:99
	expect "MAC of the lower device" "$(in_ns host cat /sys/class/net/l0/address)" = 02:00:00:00:66:99
	ip -n nmv-host link set x0 down
	expect "MAC that the lower device was given" "$(in_ns host cat /sys/class/net/l0/address)" = 02:00:00:00:66:88
	ip -n nmv-host link del x0
	up

	# A lower device that refuses the MAC is left as it was.
	ip -n nmv-host link add e1 type veth peer name e2
	ip -n nmv-host link set e1 up
	ip -n nmv-host link add m0 link e1 address 02:00:00:00:66:01 type macvlan mode bridge
	ip -n nmv-host link add m1 link e1 address 02:00:00:00:66:02 type macvlan mode bridge
	ip -n nmv-host link set m0 up; ip -n nmv-host link set m1 up
	in_ns host $frames add napi_macvlan x0 m0 8 || die "passthru on a macvlan cannot be made"
	ip -n nmv-host link set x0 address 02:00:00:00:66:02
	ip -n nmv-host link set x0 up 2>/dev/null && die "up with a MAC that the lower device refused"
	expect "MAC of the lower device" "$(in_ns host cat /sys/class/net/m0/address)" = 02:00:00:00:66:01
	expect "promiscuity of the lower device" "$(promiscuity m0)" = "promiscuity 0"
	ip -n nmv-host link del e1
}

test_attributes() {
	local n
	# macvlan's flags, lists of MAC addresses, read-only length, broadcast cutoff
	for n in 2 3 4 5 6 8 9 31; do
		in_ns host $frames with napi_macvlan x0 l0 $n 2>"$work/refused" &&
			die "attribute $n of macvlan was taken and ignored"
		grep -q 'not supported' "$work/refused" || die "attribute $n: $(cat "$work/refused")"
	done
}

has_queue() { [ "$(stat host "${1:-t0}" tap_queues)" -ge 1 ]; }
test_ring() {
	local t
	t=$(stat host t0 rx_dropped_no_queue)
	in_ns out $frames send 10.66.0.255 7000 20 broadcast
	reaches host t0 rx_dropped_no_queue $((t + 20))

	ip -n nmv-host link set t0 txqueuelen 64
	start host $frames hold t0 1 >"$work/held"
	until_true 5 has_queue || die "no queue in ethtool -S"
	t=$(stat host t0 rx_dropped_ring_full)
	in_ns out $frames send 10.66.0.255 7000 100 broadcast
	reaches host t0 rx_dropped_ring_full $((t + 36))
	expect "ring_high_water" "$(stat host t0 tapq0_ring_high_water)" -eq 64
	ip -n nmv-host link set t0 txqueuelen 10
	expect "lost by the shrink" "$(stat host t0 rx_dropped_shrink)" -eq 54
	stop_all
	ip -n nmv-host link set t0 txqueuelen 500

	# Guest's side: who sends is known.
	start host $frames write t0 30 >"$work/tid"
	until_true 5 test -s "$work/tid" || die "nothing was written to /dev/tapN"
	expect "tx_packets_lower of t0" "$(stat host t0 tx_packets_lower)" -ge 30
	expect "tapq0_tx_packets" "$(stat host t0 tapq0_tx_packets)" -ge 10
	expect "tapq0_worker_tid" "$(stat host t0 tapq0_worker_tid)" -eq "$(cat "$work/tid")"
	stop_all
	balance host t0
}

mtus() {
	ip -n nmv-host link set l0 mtu "$1"
	ip -n nmv-a link set a0 mtu "$1" && ip -n nmv-b link set b0 mtu "$1" || die "MTU $1"
}
wait_all() { wait "${jobs_started[@]}"; jobs_started=(); }
test_bytes() {
	local n
	mtus 65535
	ip -n nmv-b link set b0 down; ip -n nmv-b link set b0 up
	# Without its thread b0 answers no question for its address.
	ip -n nmv-a neigh replace 10.66.0.2 lladdr "$(in_ns b cat /sys/class/net/b0/address)" dev a0
	threaded b b0 1
	# On a slow machine the thread may run before all frames were sent.
	for n in 1 2 3 4 5; do
		rm -f "$work/burst" "$work/away"
		start a $frames burst 10.66.0.2 7001 600 60000 <&9 >"$work/burst"
		begun burst
		start b $frames starve b0 0.8 >"$work/away"
		begun away
		echo >&9
		wait_all
		# 16 MiB of frames of 60,000 bytes
		expect "queue_high_water" "$(stat b b0 queue_high_water)" -le 280
		at_least b b0 rx_dropped_queue_bytes 1 && break
	done
	say "bytes: $(stat b b0 queue_high_water) frames of 60,000 bytes waited at most"
	reaches b b0 rx_dropped_queue_bytes 1
	threaded b b0 0
	ip -n nmv-a neigh del 10.66.0.2 dev a0
	mtus 1500
	carries a b 10.66.0.2 100
	balance b b0
}

test_scan() {
	local scans
	ip -n nmv-host link add t1 index 7067 link l0 type napi_macvtap
	ip -n nmv-host link set t1 up
	ip -n nmv-a neigh replace 10.66.0.88 lladdr "$(in_ns host cat /sys/class/net/t1/address)" dev a0
	rm -f "$work/held" "$work/burst" "$work/rtnl"
	start host $frames hold t1 1 >"$work/held"
	start a $frames burst 10.66.0.88 7001 2000 64 <&9 >"$work/burst"
	begun held burst
	start host $frames rtnl l0 <&8 >"$work/rtnl"
	begun rtnl
	# The queue is not known, and cannot become so meanwhile.
	trace workqueue/workqueue_execute_start
	echo >&9
	sleep 1
	scans=$(traced nmv_tapq_work)
	echo >&8
	reaches host t1 rx_forwarded 1000
	expect "tries to find a queue in a second" "$scans" -ge 1
	expect "tries to find a queue in a second" "$scans" -le 30
	has_queue t1 || die "the queue is never found"
	stop_all
	ip -n nmv-a neigh del 10.66.0.88 dev a0
	ip -n nmv-host link del t1
}

test_broadcast() {
	local n sent=3000 lost polls
	for n in $(seq 100); do
		echo "link add k$n link l0 group 66 type napi_macvlan"
		echo "link set k$n up"
	done >"$work/batch"
	ip -n nmv-host -batch "$work/batch" || die "a hundred devices cannot be made"
	lost=$(stat host k1 port_dropped_broadcast)
	for n in 0 1 2; do
		rm -f "$work/burst$n"
		start out taskset -c $((n % $(nproc))) $frames burst 10.66.0.255 7001 $((sent / 3)) 64 \
			<&9 >"$work/burst$n"
	done
	begun burst0 burst1 burst2
	trace napi/napi_poll
	for n in 0 1 2; do echo >&9; done
	wait_all
	# The last of the list gets its copies last.
	told() { [ $(($(stat host k100 rx_broadcast) + $(stat host k100 port_dropped_broadcast) - lost)) -ge $sent ]; }
	until_true 60 told || die "k100 heard $(stat host k100 rx_broadcast) of $sent broadcasts, lost $(stat host k100 port_dropped_broadcast)"
	polls=$(traced 'device nmv-broadcast ')
	lost=$(($(stat host k1 port_dropped_broadcast) - lost))
	in_ns host sh -c 'for n in $(seq 100); do ethtool -S k$n; done' >"$work/each"
	expect "devices, and broadcasts that each heard" \
		"$(awk '$1 == "rx_broadcast:" { print $2 }' "$work/each" | sort | uniq -c | xargs)" \
		= "100 $((sent - lost))"
	balance host k1
	say "broadcast: $lost of $sent lost, $polls polls"
	# 103 devices, 64 copies a poll
	expect "polls" $((polls * 64)) -ge $((103 * (sent - lost)))
	ip -n nmv-host link del group 66
	carries out a 10.66.0.1 100
}

test_uplink() {
	local before
	ip -n nmv-a neigh replace 10.66.0.77 lladdr 02:00:00:00:77:77 dev a0
	before=$(stat host t0 rx_received)
	in_ns a $frames send 10.66.0.77 7000 50
	# Others may have asked for an address meanwhile.
	expect "frames to nobody without an uplink" $(($(stat host t0 rx_received) - before)) -lt 10
	in_ns host $frames set t0 uplink 1 || die "uplink cannot be set"
	expect "the attribute uplink" "$(in_ns host $frames get t0 uplink)" -eq 1
	before=$(stat host t0 rx_forwarded)
	in_ns a $frames send 10.66.0.77 7000 50
	expect "frames to nobody that the uplink got" $(($(stat host t0 rx_forwarded) - before)) -ge 50
	ip -n nmv-host link add t1 link l0 type napi_macvtap
	in_ns host $frames set t1 uplink 1 2>/dev/null && die "two uplinks on one device"
	ip -n nmv-host link del t1
	# Cleared and set while frames are on their way; the last word is off.
	start a $frames flood 10.66.0.77 7001
	for _ in 1 2 3 4 5 6 7 8; do
		in_ns host $frames set t0 uplink 0
		in_ns host $frames set t0 uplink 1
		ip -n nmv-host link set t0 down; ip -n nmv-host link set t0 up
	done
	in_ns host $frames set t0 uplink 0
	stop_all
	ip -n nmv-a neigh del 10.66.0.77 dev a0
	carries a b 10.66.0.2 100
	balance host t0
}

test_busy() {
	local kind
	for kind in napi_macvlan napi_macvtap; do
		ip -n nmv-host link add e1 type veth peer name e2
		ip -n nmv-host link set e1 up; ip -n nmv-host link set e2 up
		ip -n nmv-host link add m0 link e1 type macvlan || die "no macvlan to compare with"
		ip -n nmv-host link add y0 link e1 type $kind || die "cannot be made beside macvlan"
		ip -n nmv-host link set y0 up 2>/dev/null && die "came up on a device that macvlan has"
		ip -n nmv-host link del m0
		ip -n nmv-host link set y0 up || die "does not come up after macvlan left"
		ip -n nmv-host link add m0 link e1 type macvlan 2>/dev/null && die "macvlan took it back"
		ip -n nmv-host link set y0 down
		ip -n nmv-host link add m0 link e1 type macvlan || die "down, yet the lower device is held"
		ip -n nmv-host link del e1
	done
}

flood_on() {
	start a $frames flood 10.66.0.2 7001
	start b $frames flood 10.66.0.255 7001
	start out $frames flood 10.66.0.1 7001
	start out $frames flood 10.66.0.255 7001
	start host $frames hold t0 2 >"$work/held"
}

test_changes() {
	local n
	flood_on
	for n in 1 2 3 4 5 6 7 8; do
		ip -n nmv-b link set b0 address "02:00:00:00:0b:0$n" || die "MAC change"
		ip -n nmv-a link set a0 mtu $((1400 + n)) || die "MTU change"
		ip -n nmv-host link set l0 mtu $((1300 + n)) || die "MTU of the lower device"
		expect "MTU of b0" "$(in_ns b cat /sys/class/net/b0/mtu)" -le $((1300 + n))
		ip -n nmv-host link set l0 mtu 1500
		ip -n nmv-host link set t0 txqueuelen $((n * 40))
		ip -n nmv-host link set l0 down; ip -n nmv-host link set l0 up
		ip -n nmv-b link set b0 down; ip -n nmv-b link set b0 up || die "b0 does not come up again"
		ip -n nmv-b link set b0 promisc on; ip -n nmv-b link set b0 allmulticast on
		ip -n nmv-b link set b0 promisc off; ip -n nmv-b link set b0 allmulticast off
		ip -n nmv-b link set b0 netns nmv-out; ip -n nmv-out link set b0 netns nmv-b
		ip -n nmv-b addr add 10.66.0.2/24 dev b0; ip -n nmv-b link set b0 up || die "moved, not up"
		ip -n nmv-host link set t0 netns nmv-a
		ip -n nmv-a link set t0 up || die "t0 is not up in another namespace"
		ip -n nmv-a link set t0 netns nmv-host; ip -n nmv-host link set t0 up
	done
	stop_all
	ip -n nmv-a link set a0 mtu 1500; ip -n nmv-b link set b0 mtu 1500
	carries a b 10.66.0.2 100
	carries out a 10.66.0.1 100
	balance a a0; balance b b0; balance host t0
}

test_lengths() {
	local said
	flood_on
	ip -n nmv-a neigh replace 10.66.0.66 lladdr "$(in_ns host cat /sys/class/net/t0/address)" dev a0
	start a $frames flood 10.66.0.66 7001
	start a $frames flood 10.66.0.66 7002
	start host $frames drain t0 1
	said=$(in_ns host $frames resize t0 "$flood_seconds") || die "the ring's length cannot be set"
	say "lengths: set $said"
	stop_all
	ip -n nmv-a neigh del 10.66.0.66 dev a0
	ip -n nmv-host link set t0 txqueuelen 500
	start host $frames tap t0 50 20 >"$work/got"
	until_true 60 has_queue || die "no queue in ethtool -S"
	in_ns out $frames send 10.66.0.255 7000 50 broadcast
	until_true 20 test -s "$work/got" || die "no frames after the flood"
	expect "frames through the ring afterwards" "$(cat "$work/got")" -ge 50
	stop_all
	balance host t0
}

test_statistics() {
	local most
	ip -n nmv-host link set t0 txqueuelen 0
	start host $frames hold t0 1 >"$work/held"
	start out $frames flood 10.66.0.255 7001
	start b $frames flood 10.66.0.255 7001
	until_true 60 has_queue || die "no queue in ethtool -S"
	most=$(in_ns host $frames largest t0 tapq0_delivered 5)
	stop_all
	ip -n nmv-host link set t0 txqueuelen 500
	expect "most frames delivered by a ring of length 0" "$most" = 0
}

test_cycles() {
	local n
	flood_on
	for n in $(seq "$cycles"); do
		echo "link add c0 link l0 type napi_macvlan"
		echo "link add c1 link l0 type napi_macvtap"
		echo "link set c0 up"
		echo "link set c1 up"
		echo "link del c0"
		echo "link del c1"
	done >"$work/batch"
	ip -n nmv-host -batch "$work/batch" || die "a cycle of create and delete"
	stop_all
	carries a b 10.66.0.2 100
}

test_deletion() {
	flood_on
	ip -n nmv-host link del l0 || die "the lower device does not go"
	until_true 5 sh -c '! ip -n nmv-a link show a0' || die "a0 outlives its lower device"
	stop_all
	lower; devices
	# A process keeps its namespace: none in those that go.
	start a $frames flood 10.66.0.2 7001
	start out $frames flood 10.66.0.255 7001
	ip netns del nmv-b
	ip netns del nmv-host
	until_true 20 sh -c '! ip -n nmv-a link show a0 2>/dev/null | grep -q a0' ||
		die "a0 outlives the namespace of its lower device"
	stop_all
	for ns in a out; do ip netns del nmv-$ns; done
}

test_unload() {
	local n
	topology
	rmmod napi_macvlan 2>/dev/null && die "unloaded with devices in use"
	rm "$work/held"
	start host $frames hold t0 1 >"$work/held"
	until_true 5 test -s "$work/held" || die "/dev/tapN of t0 does not open"
	ip -n nmv-host link del l0
	until_true 5 sh -c '! ip -n nmv-a link show a0' || die "a0 outlives its lower device"
	rmmod napi_macvlan 2>/dev/null && die "unloaded with /dev/tapN open"
	stop_all
	for n in 1 2 3; do
		until_true 10 rmmod napi_macvlan || die "does not unload"
		load
	done
}

# A bad page, an oops, a warning, a lockup; bits of Documentation/admin-guide/tainted-kernels
tainted() { echo $(($(cat /proc/sys/kernel/tainted) & (1 << 5 | 1 << 7 | 1 << 9 | 1 << 14))); }
healthy() {
	$frames complaints "$log" >"$work/complaints" || die "$1: the kernel's log cannot be read"
	[ ! -s "$work/complaints" ] || { cat "$work/complaints" >&2; die "$1: the kernel complained, above"; }
	expect "$1: taint of the kernel" "$(tainted)" -eq "$taint"
}

log=$($frames log) || die "the kernel's log cannot be read; is this root?"
taint=$(tainted)
lsmod | grep -q '^napi_macvlan ' || load
topology
for step in $steps; do
	say "$step"
	"test_$step"
	healthy "$step"
done
say "passed"
