/* SPDX-License-Identifier: GPL-2.0 */
/* Decisions without state: hashes of addresses, and who may hear whom. */
#ifndef NMV_MODE_H
#define NMV_MODE_H

#include <linux/types.h>

#define NMV_HASH_BITS	8
#define NMV_HASH_SIZE	(1 << NMV_HASH_BITS)
#define NMV_MC_BITS	256

unsigned int nmv_hash_mac(const u8 *addr);
unsigned int nmv_hash_mc(const u8 *addr);
bool nmv_mode_known(u32 mode);
bool nmv_mode_changeable(u32 from, u32 to);
bool nmv_hears_sibling(u32 src, u32 dst);
bool nmv_hears_nic_unicast(bool src_is_ours, u32 dst);
bool nmv_hears_nic_multicast(bool src_is_ours, bool src_is_self, u32 src,
			     u32 dst);

#endif
