// SPDX-License-Identifier: GPL-2.0
/* Counters: 64 bits, per CPU, summed when read. */
#include "nmv.h"

/**
 * nmv_count() - add to a counter
 * @nd: device
 * @what: counter
 * @n: how much
 *
 * Context: bottom halves off.
 */
void nmv_count(struct nmv_dev *nd, enum nmv_stat what, u64 n)
{
	struct nmv_pcpu *p = this_cpu_ptr(nd->stats);

	u64_stats_update_begin(&p->syncp);
	u64_stats_add(&p->v[what], n);
	u64_stats_update_end(&p->syncp);
}

/**
 * nmv_count_frame() - count one frame
 * @nd: device
 * @what: counter of frames
 * @also: another counter
 * @n: what that one gets
 *
 * Context: bottom halves off.
 */
void nmv_count_frame(struct nmv_dev *nd, enum nmv_stat what,
		     enum nmv_stat also, u64 n)
{
	struct nmv_pcpu *p = this_cpu_ptr(nd->stats);

	u64_stats_update_begin(&p->syncp);
	u64_stats_inc(&p->v[what]);
	u64_stats_add(&p->v[also], n);
	u64_stats_update_end(&p->syncp);
}

/**
 * nmv_stats_sum() - all counters of a device over all CPUs
 * @nd: device
 * @sum: NMV_STATS values
 */
void nmv_stats_sum(const struct nmv_dev *nd, u64 *sum)
{
	u64 v[NMV_STATS];
	unsigned int start;
	int cpu, i;

	memset(sum, 0, sizeof(*sum) * NMV_STATS);
	for_each_possible_cpu(cpu) {
		const struct nmv_pcpu *p = per_cpu_ptr(nd->stats, cpu);

		do {
			start = u64_stats_fetch_begin(&p->syncp);
			for (i = 0; i < NMV_STATS; i++)
				v[i] = u64_stats_read(&p->v[i]);
		} while (u64_stats_fetch_retry(&p->syncp, start));
		for (i = 0; i < NMV_STATS; i++)
			sum[i] += v[i];
	}
}

void nmv_get_stats64(struct net_device *dev, struct rtnl_link_stats64 *s)
{
	u64 v[NMV_STATS];
	int i;

	nmv_stats_sum(netdev_priv(dev), v);
	s->rx_packets = v[NMV_RX_DELIVERED];
	s->rx_bytes = v[NMV_RX_BYTES];
	s->multicast = v[NMV_RX_MULTICAST];
	for (i = NMV_RX_DROPPED_RING_FULL; i <= NMV_RX_DROPPED_OTHER; i++)
		s->rx_dropped += v[i];
	s->tx_packets = v[NMV_TX_LOWER] + v[NMV_TX_SIBLING];
	s->tx_bytes = v[NMV_TX_BYTES];
	s->tx_dropped = v[NMV_TX_DROPPED];
}
