// SPDX-License-Identifier: GPL-2.0
/* Checked when the module loads, in debug builds ("make debug") only. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/icmpv6.h>
#include <linux/if_tun.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/ptr_ring.h>
#include <net/ipv6.h>
#include <net/ndisc.h>
#include "nmv.h"

struct nmv_mode_case {
	u32 src, dst;
	bool sibling;		/* handed over inside the host */
	bool reflected;		/* multicast, sent back by the switch */
};

static const struct nmv_mode_case nmv_mode_cases[] = {
	{ MACVLAN_MODE_BRIDGE,  MACVLAN_MODE_BRIDGE,  true,  true },
	{ MACVLAN_MODE_BRIDGE,  MACVLAN_MODE_VEPA,    false, true },
	{ MACVLAN_MODE_BRIDGE,  MACVLAN_MODE_PRIVATE, false, false },
	{ MACVLAN_MODE_VEPA,    MACVLAN_MODE_BRIDGE,  false, true },
	{ MACVLAN_MODE_VEPA,    MACVLAN_MODE_VEPA,    false, true },
	{ MACVLAN_MODE_VEPA,    MACVLAN_MODE_PRIVATE, false, false },
	{ MACVLAN_MODE_PRIVATE, MACVLAN_MODE_BRIDGE,  false, false },
	{ MACVLAN_MODE_PRIVATE, MACVLAN_MODE_VEPA,    false, false },
	{ MACVLAN_MODE_PRIVATE, MACVLAN_MODE_PRIVATE, false, false },
};

#define NMV_EXPECT(what)						\
	do {								\
		if (!(what)) {						\
			pr_err("self-test failed: %s, %s:%d\n", #what,	\
			       __func__, __LINE__);			\
			return -EINVAL;					\
		}							\
	} while (0)

static int nmv_test_modes(void)
{
	u32 mode;
	int i;

	for (i = 0; i < ARRAY_SIZE(nmv_mode_cases); i++) {
		const struct nmv_mode_case *c = &nmv_mode_cases[i];

		NMV_EXPECT(nmv_hears_sibling(c->src, c->dst) == c->sibling);
		NMV_EXPECT(nmv_hears_nic_multicast(true, false, c->src,
						   c->dst) == c->reflected);
		/* Strangers are heard by everybody. */
		NMV_EXPECT(nmv_hears_nic_multicast(false, false, 0, c->dst));
		NMV_EXPECT(nmv_hears_nic_unicast(false, c->dst));
		NMV_EXPECT(nmv_hears_nic_unicast(true, c->dst) ==
			   (c->dst != MACVLAN_MODE_PRIVATE));
	}
	/* No VEPA device hears itself; only a virtual MAC may come back. */
	NMV_EXPECT(!nmv_hears_nic_multicast(true, true, MACVLAN_MODE_VEPA,
					    MACVLAN_MODE_VEPA));
	NMV_EXPECT(nmv_hears_nic_multicast(true, true, MACVLAN_MODE_BRIDGE,
					   MACVLAN_MODE_BRIDGE));
	for (mode = 0; mode <= 32; mode++)
		NMV_EXPECT(nmv_mode_known(mode) ==
			   (mode == 1 || mode == 2 || mode == 4 || mode == 8));
	NMV_EXPECT(nmv_mode_changeable(MACVLAN_MODE_VEPA, MACVLAN_MODE_BRIDGE));
	NMV_EXPECT(!nmv_mode_changeable(MACVLAN_MODE_PASSTHRU,
					MACVLAN_MODE_BRIDGE));
	NMV_EXPECT(!nmv_mode_changeable(MACVLAN_MODE_BRIDGE,
					MACVLAN_MODE_PASSTHRU));
	return 0;
}

/* Guests' addresses often differ in the last byte only: these must spread. */
static int nmv_test_hash(void)
{
	u8 mac[ETH_ALEN + 2] = { 0x52, 0x54, 0x00, 0x12, 0x34, 0x00 };
	u8 group[ETH_ALEN + 2] = { 0x01, 0x00, 0x5e, 0x00, 0x00, 0x00 };
	DECLARE_BITMAP(macs, NMV_HASH_SIZE) = {};
	DECLARE_BITMAP(groups, NMV_MC_BITS) = {};
	int i;

	for (i = 0; i < 256; i++) {
		mac[5] = i;
		group[5] = i;
		NMV_EXPECT(nmv_hash_mac(mac) < NMV_HASH_SIZE);
		NMV_EXPECT(nmv_hash_mc(group) < NMV_MC_BITS);
		NMV_EXPECT(nmv_hash_mac(mac) == nmv_hash_mac(mac));
		__set_bit(nmv_hash_mac(mac), macs);
		__set_bit(nmv_hash_mc(group), groups);
	}
	NMV_EXPECT(bitmap_weight(macs, NMV_HASH_SIZE) >= NMV_HASH_SIZE / 2);
	NMV_EXPECT(bitmap_weight(groups, NMV_MC_BITS) >= NMV_MC_BITS / 2);
	return 0;
}

static int nmv_test_bound(void)
{
	u32 waiting = 0;

	while (nmv_queue_admits(waiting, 3))
		waiting++;
	NMV_EXPECT(waiting == 3);
	NMV_EXPECT(!nmv_queue_admits(4, 3));
	NMV_EXPECT(nmv_queue_admits(0, 1));
	NMV_EXPECT(nmv_queue_admits(NMV_QUEUE_LEN_MAX - 1, NMV_QUEUE_LEN_MAX));
	NMV_EXPECT(nmv_queue_admits_multicast(499, 1000));
	NMV_EXPECT(!nmv_queue_admits_multicast(500, 1000));
	NMV_EXPECT(nmv_queue_admits_multicast(0, 1));
	/* Bytes: the last frame may exceed the bound. */
	NMV_EXPECT(nmv_queue_admits(NMV_QUEUE_BYTES - 1, NMV_QUEUE_BYTES));
	NMV_EXPECT(!nmv_queue_admits(NMV_QUEUE_BYTES, NMV_QUEUE_BYTES));
	NMV_EXPECT(!nmv_queue_admits_multicast(NMV_QUEUE_BYTES / 2,
					       NMV_QUEUE_BYTES));
	return 0;
}

static void nmv_test_destroy(void *unused)
{
}

/* A ring as txqueuelen makes it, also while frames are on their way to it. */
static int nmv_test_ring(void)
{
	bool right = true;
	struct ptr_ring r;
	int frame;
	u32 head;

	if (ptr_ring_init(&r, 1, GFP_KERNEL))
		return -ENOMEM;
	local_bh_disable();
	right &= nmv_ring_room(&r, 1) && nmv_ring_room(&r, 2);
	right &= nmv_ring_used(&r, &head) == 0;
	right &= !ptr_ring_produce(&r, &frame);
	right &= !nmv_ring_room(&r, 1);
	right &= nmv_ring_used(&r, &head) == 1;
	local_bh_enable();
	right &= !ptr_ring_resize(&r, 0, GFP_KERNEL, nmv_test_destroy);
	local_bh_disable();
	right &= !nmv_ring_room(&r, 1);
	right &= nmv_ring_used(&r, &head) == 0;
	local_bh_enable();
	/* Emptied before a batch was complete. */
	right &= !ptr_ring_resize(&r, 40, GFP_KERNEL, nmv_test_destroy);
	local_bh_disable();
	right &= !ptr_ring_produce(&r, &frame) && ptr_ring_consume(&r);
	right &= nmv_ring_room(&r, 25) && nmv_ring_room(&r, 40);
	right &= !ptr_ring_produce(&r, &frame);
	right &= nmv_ring_room(&r, 1);
	local_bh_enable();
	ptr_ring_cleanup(&r, nmv_test_destroy);
	NMV_EXPECT(right);
	return 0;
}

/* A large frame for a queue whose reader takes none, and for one that does. */
static int nmv_test_places(void)
{
	struct sk_buff *skb = alloc_skb(10000, GFP_KERNEL);
	struct nmv_tap *t = kzalloc(sizeof(*t), GFP_KERNEL);
	struct tap_queue *q = kzalloc(sizeof(*q), GFP_KERNEL);
	bool right = true;
	int err = -ENOMEM;

	if (!skb || !t || !q)
		goto out;
	err = 0;
	skb_put_zero(skb, 10000);
	skb->ip_summed = CHECKSUM_PARTIAL;
	right &= nmv_tap_places(&t->tap, q, skb) == 1;
	skb_shinfo(skb)->gso_type = SKB_GSO_TCPV4;
	skb_shinfo(skb)->gso_size = 1000;
	skb_shinfo(skb)->gso_segs = 10;
	right &= nmv_tap_places(&t->tap, q, skb) == 10;
	/* Of a guest: nobody has counted, and it may ask for anything. */
	skb_shinfo(skb)->gso_type |= SKB_GSO_DODGY;
	skb_shinfo(skb)->gso_segs = 0;
	skb_shinfo(skb)->gso_size = 999;
	right &= nmv_tap_places(&t->tap, q, skb) == 11;
	skb_shinfo(skb)->gso_size = 1;
	right &= nmv_tap_places(&t->tap, q, skb) == 10000;
	t->tap.tap_features = NETIF_F_HW_CSUM | NETIF_F_TSO;
	right &= nmv_tap_places(&t->tap, q, skb) == 10000;
	q->flags = IFF_VNET_HDR;
	right &= nmv_tap_places(&t->tap, q, skb) == 1;
out:
	kfree(q);
	kfree(t);
	kfree_skb(skb);
	if (err)
		return err;
	NMV_EXPECT(right);
	return 0;
}

static int nmv_test_discovery(void)
{
	const u8 yes[] = { NDISC_ROUTER_SOLICITATION,
			   NDISC_ROUTER_ADVERTISEMENT,
			   NDISC_NEIGHBOUR_SOLICITATION,
			   NDISC_NEIGHBOUR_ADVERTISEMENT, NDISC_REDIRECT };
	const u8 no[] = { ICMPV6_ECHO_REQUEST, ICMPV6_ECHO_REPLY,
			  ICMPV6_PKT_TOOBIG, ICMPV6_MLD2_REPORT };
	struct sk_buff *skb = alloc_skb(128, GFP_KERNEL);
	struct ipv6hdr *ip6;
	bool right = true;
	u8 *type;
	int i;

	if (!skb)
		return -ENOMEM;
	skb->protocol = htons(ETH_P_ARP);
	right &= nmv_is_discovery(skb);
	skb->protocol = htons(ETH_P_IP);
	right &= !nmv_is_discovery(skb);
	/* Cut short before and after the header. */
	skb->protocol = htons(ETH_P_IPV6);
	right &= !nmv_is_discovery(skb);
	ip6 = skb_put_zero(skb, sizeof(*ip6));
	ip6->nexthdr = IPPROTO_ICMPV6;
	right &= !nmv_is_discovery(skb);
	type = skb_put_zero(skb, sizeof(struct icmp6hdr));
	for (i = 0; i < ARRAY_SIZE(yes); i++) {
		*type = yes[i];
		right &= nmv_is_discovery(skb);
	}
	for (i = 0; i < ARRAY_SIZE(no); i++) {
		*type = no[i];
		right &= !nmv_is_discovery(skb);
	}
	*type = NDISC_NEIGHBOUR_ADVERTISEMENT;
	ip6->nexthdr = IPPROTO_UDP;
	right &= !nmv_is_discovery(skb);
	kfree_skb(skb);
	NMV_EXPECT(right);
	return 0;
}

static int nmv_test_control(void)
{
	struct sk_buff *skb = alloc_skb(128, GFP_KERNEL);
	bool right = true;
	u8 *head;

	if (!skb)
		return -ENOMEM;
	skb->protocol = htons(ETH_P_ARP);
	right &= nmv_is_control(skb);
	skb->protocol = htons(ETH_P_802_2);
	right &= nmv_is_control(skb);
	skb->protocol = htons(ETH_P_LLDP);
	right &= !nmv_is_control(skb);
	/* Cut short. */
	skb->protocol = htons(ETH_P_IP);
	right &= !nmv_is_control(skb);
	head = skb_put_zero(skb, sizeof(struct ipv6hdr) +
				 sizeof(struct icmp6hdr));
	head[1] = 0xc0;
	right &= nmv_is_control(skb);
	/* Expedited forwarding is the guest's payload. */
	head[1] = 0xb8;
	right &= !nmv_is_control(skb);
	/* The traffic class lies across two bytes. */
	skb->protocol = htons(ETH_P_IPV6);
	head[0] = 0x6c;
	head[1] = 0x00;
	right &= nmv_is_control(skb);
	head[0] = 0x6b;
	head[1] = 0x80;
	right &= !nmv_is_control(skb);
	((struct ipv6hdr *)head)->nexthdr = IPPROTO_ICMPV6;
	head[sizeof(struct ipv6hdr)] = NDISC_NEIGHBOUR_SOLICITATION;
	right &= nmv_is_control(skb);
	kfree_skb(skb);
	/* As a sibling sends it, with its Ethernet header. */
	skb = alloc_skb(128, GFP_KERNEL);
	if (!skb)
		return -ENOMEM;
	head = skb_put_zero(skb, ETH_HLEN + sizeof(struct iphdr));
	skb_set_network_header(skb, ETH_HLEN);
	skb->protocol = htons(ETH_P_IP);
	head[1] = 0xc0;
	right &= !nmv_is_control(skb);
	head[ETH_HLEN + 1] = 0xc0;
	right &= nmv_is_control(skb);
	skb->protocol = htons(46);
	right &= nmv_is_control(skb);
	kfree_skb(skb);
	NMV_EXPECT(right);
	return 0;
}

/* As a sibling sends it: the tag is in the frame. */
static int nmv_test_tagged(void)
{
	struct sk_buff *skb = alloc_skb(128, GFP_KERNEL);
	bool right = true;
	__be16 *proto;
	u8 *head;

	if (!skb)
		return -ENOMEM;
	skb_reset_mac_header(skb);
	head = skb_put_zero(skb, ETH_HLEN);
	skb->protocol = htons(ETH_P_8021Q);
	/* Cut short. */
	right &= !nmv_is_control(skb) && !nmv_is_discovery(skb);
	skb_put_zero(skb, VLAN_HLEN + sizeof(struct ipv6hdr) +
			  sizeof(struct icmp6hdr));
	proto = (__be16 *)(head + ETH_HLEN + 2);
	head += ETH_HLEN + VLAN_HLEN;
	*proto = htons(ETH_P_ARP);
	right &= nmv_is_control(skb) && nmv_is_discovery(skb);
	*proto = htons(46);
	right &= nmv_is_control(skb) && !nmv_is_discovery(skb);
	*proto = htons(ETH_P_IP);
	right &= !nmv_is_control(skb);
	head[1] = 0xc0;
	right &= nmv_is_control(skb);
	*proto = htons(ETH_P_IPV6);
	right &= !nmv_is_control(skb) && !nmv_is_discovery(skb);
	((struct ipv6hdr *)head)->nexthdr = IPPROTO_ICMPV6;
	head[sizeof(struct ipv6hdr)] = NDISC_NEIGHBOUR_SOLICITATION;
	right &= nmv_is_control(skb) && nmv_is_discovery(skb);
	/* Behind a second one nobody looks, nor after the first was taken out. */
	*proto = htons(ETH_P_8021Q);
	right &= !nmv_is_control(skb) && !nmv_is_discovery(skb);
	*proto = htons(ETH_P_ARP);
	__vlan_hwaccel_put_tag(skb, htons(ETH_P_8021Q), 1);
	right &= !nmv_is_control(skb) && !nmv_is_discovery(skb);
	kfree_skb(skb);
	NMV_EXPECT(right);
	return 0;
}

/**
 * nmv_selftest() - check hashes, modes, the bounds of the own queue and of rings,
 *	the places that frames take, and which of them tell of neighbours or are
 *	control frames
 *
 * Return: 0, or -EINVAL with the failed condition in the kernel's log; then
 * the module does not load
 */
int nmv_selftest(void)
{
	int err;

	err = nmv_test_modes() ?: nmv_test_hash() ?: nmv_test_bound() ?:
	      nmv_test_ring() ?: nmv_test_places() ?: nmv_test_discovery() ?:
	      nmv_test_control() ?: nmv_test_tagged();
	if (err)
		return err;
	pr_info("self-tests passed\n");
	return nmv_mistake();
}
