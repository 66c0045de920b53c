// SPDX-License-Identifier: GPL-2.0
/* Decisions without state: hashes of addresses, and who may hear whom. */
#include <linux/etherdevice.h>
#include <linux/hash.h>
#include <linux/if_link.h>
#include "mode.h"

/**
 * nmv_hash_mac() - bucket of a device in its port
 * @addr: MAC address, 6 bytes
 *
 * Return: 0 to NMV_HASH_SIZE - 1
 */
unsigned int nmv_hash_mac(const u8 *addr)
{
	return hash_64(ether_addr_to_u64(addr), NMV_HASH_BITS);
}

/**
 * nmv_hash_mc() - bit of a multicast address in a device's filter
 * @addr: multicast or broadcast address, 6 bytes
 *
 * Return: 0 to NMV_MC_BITS - 1
 */
unsigned int nmv_hash_mc(const u8 *addr)
{
	return hash_64(ether_addr_to_u64(addr), ilog2(NMV_MC_BITS));
}

bool nmv_mode_known(u32 mode)
{
	return mode == MACVLAN_MODE_PRIVATE || mode == MACVLAN_MODE_VEPA ||
	       mode == MACVLAN_MODE_BRIDGE || mode == MACVLAN_MODE_PASSTHRU;
}

/**
 * nmv_mode_changeable() - may a device that exists change its mode
 * @from: mode it has
 * @to: mode asked for
 *
 * Passthru decides what the lower device's MAC and filter are, so a device is
 * made with it or without it.
 */
bool nmv_mode_changeable(u32 from, u32 to)
{
	return from == to || (from != MACVLAN_MODE_PASSTHRU &&
			      to != MACVLAN_MODE_PASSTHRU);
}

/**
 * nmv_hears_sibling() - is a frame handed straight from one device to another
 * @src: mode of the sender
 * @dst: mode of the receiver, another device of the same port
 */
bool nmv_hears_sibling(u32 src, u32 dst)
{
	return src == MACVLAN_MODE_BRIDGE && dst == MACVLAN_MODE_BRIDGE;
}

/**
 * nmv_hears_nic_unicast() - may a unicast frame from the wire reach a device
 * @src_is_ours: its source address is that of a sibling
 * @dst: mode of the receiver
 *
 * A private device hears no sibling even if the switch sends its frames back.
 * Other modes get them: the address may just as well be in use on another
 * host, as while a guest migrates.
 */
bool nmv_hears_nic_unicast(bool src_is_ours, u32 dst)
{
	return !src_is_ours || dst != MACVLAN_MODE_PRIVATE;
}

/**
 * nmv_hears_nic_multicast() - the same for a multicast or broadcast frame
 * @src_is_ours: its source address is that of a device of the port
 * @src_is_self: and that device is the receiver
 * @src: mode of that device
 * @dst: mode of the receiver
 *
 * With VEPA the switch sends every frame back, to all but its sender. In
 * bridge mode the siblings had the frame already, but a router with the same
 * virtual MAC (VRRP) on another host cannot be told from a reflection, so all
 * get it, as in mainline from 7.x on. A private sender is alone.
 */
bool nmv_hears_nic_multicast(bool src_is_ours, bool src_is_self, u32 src,
			     u32 dst)
{
	if (!src_is_ours)
		return true;
	switch (src) {
	case MACVLAN_MODE_VEPA:
		return !src_is_self && (dst == MACVLAN_MODE_VEPA ||
					dst == MACVLAN_MODE_BRIDGE);
	case MACVLAN_MODE_BRIDGE:
		return dst == MACVLAN_MODE_VEPA || dst == MACVLAN_MODE_BRIDGE;
	default:
		return src_is_self;
	}
}
