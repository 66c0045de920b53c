/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
#ifndef _UAPI_LINUX_NAPI_MACVLAN_H
#define _UAPI_LINUX_NAPI_MACVLAN_H

/*
 * IFLA_INFO_DATA of the link kinds napi_macvlan and napi_macvtap. The numbers
 * below are macvlan's, of linux/if_link.h: IFLA_MACVLAN_MODE and
 * IFLA_MACVLAN_BC_QUEUE_LEN mean the same here, all others are refused.
 *
 * @IFLA_NAPI_MACVLAN_EVERY_QUEUE: u8, 0 or 1, napi_macvtap only. Broadcast,
 *	multicast, ARP and neighbour discovery go to every open queue.
 * @IFLA_NAPI_MACVLAN_UPLINK: u8, 0 or 1, napi_macvtap only. Gets what siblings
 *	send to addresses that none of them has. EBUSY if another device of the
 *	lower device has it; EPERM without CAP_NET_ADMIN over the lower device.
 * @IFLA_NAPI_MACVLAN_THREAD: u32, read only. Id of the NAPI thread in the
 *	initial pid namespace, 0 when the device is not threaded. Left out while
 *	the kernel makes or ends a thread.
 */
enum {
	IFLA_NAPI_MACVLAN_EVERY_QUEUE = 24,
	IFLA_NAPI_MACVLAN_UPLINK,
	IFLA_NAPI_MACVLAN_THREAD,
	__IFLA_NAPI_MACVLAN_MAX,
};

#define IFLA_NAPI_MACVLAN_MAX (__IFLA_NAPI_MACVLAN_MAX - 1)

#endif
