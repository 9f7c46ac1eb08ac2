//! Finds the pairs of members between which tunnels are down, from the reports of their nodes. Reports are untrusted: counts are
//! limited to the number of planned Peers, and a false report affects only the status of the reporter's own links.

use std::collections::BTreeMap;

use crate::plan::MeshPlan;

/// The number of tunnels from one node to one member, as the node reports it. Tunnels that are neither up nor down are idle or new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tunnels {
    /// Tunnels with a live session.
    pub up: u32,
    /// Tunnels that should have a session and have none.
    pub down: u32,
    /// All tunnels.
    pub total: u32,
}

/// A link with tunnels that are down, in one direction: the tunnels from the nodes of member `from` to the nodes of member `to`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct BrokenTunnels {
    /// The member whose nodes report the tunnels, by entry name.
    pub from: String,
    /// The remote member, by entry name.
    pub to: String,
    /// Tunnels with a live session, on nodes that report a tunnel down.
    pub up: usize,
    /// Tunnels that should have a session and have none.
    pub down: usize,
    /// All tunnels to the remote member, on nodes that report a tunnel down.
    pub total: usize,
}

/// The largest number of listed links, as in the CRD.
const MAX_LISTED: usize = 256;

/// Lists the links with a tunnel that is down, sorted. `reports` has, for each entry, one map per node, from the entry name of
/// a remote member to the node's tunnels to it. Entries without a planned Peer are ignored. If there are too many
/// links, those with the most tunnels down are listed.
#[must_use]
pub fn find_broken(plan: &MeshPlan, reports: &BTreeMap<String, Vec<BTreeMap<String, Tunnels>>>) -> Vec<BrokenTunnels> {
    let mut broken = Vec::new();
    for (from, nodes) in reports {
        let Some(target) = plan.targets.get(from) else { continue };
        let mut peer_counts: BTreeMap<&str, usize> = BTreeMap::new();
        for peer in target.peers.values() {
            *peer_counts.entry(&peer.source).or_default() += 1;
        }
        for (to, max_tunnels) in peer_counts {
            let mut link = BrokenTunnels {
                from: from.clone(),
                to: to.to_owned(),
                up: 0,
                down: 0,
                total: 0,
            };
            for tunnels in nodes.iter().filter_map(|node| node.get(to)) {
                let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
                let down = count(tunnels.down).min(max_tunnels);
                if down == 0 {
                    continue;
                }
                let up = count(tunnels.up).min(max_tunnels - down);
                link.down += down;
                link.up += up;
                link.total += count(tunnels.total).clamp(down + up, max_tunnels);
            }
            if link.down > 0 {
                broken.push(link);
            }
        }
    }
    broken.sort_by(|a, b| b.down.cmp(&a.down).then_with(|| a.cmp(b)));
    broken.truncate(MAX_LISTED);
    broken.sort();
    broken
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        key::PublicKey,
        observe::{PeerRole, PeerSpec},
        plan::{PlannedPeer, TargetPlan},
    };

    /// A mesh of the members `a` and `b`, each with two nodes.
    fn mesh() -> MeshPlan {
        let target = |source: &str| {
            let peer = |node: &str| PlannedPeer {
                source: source.into(),
                node: node.into(),
                spec: Arc::new(PeerSpec {
                    public_key: PublicKey::new([1; 32]),
                    allowed_ips: Default::default(),
                    endpoint: None,
                    candidates: Vec::new(),
                    persistent_keepalive: 0,
                    role: PeerRole::Node,
                }),
            };
            TargetPlan {
                peers: ["1", "2"].map(|node| (node.to_owned(), peer(node).into())).into(),
                ..TargetPlan::default()
            }
        };
        MeshPlan {
            targets: [("a".to_owned(), target("b")), ("b".to_owned(), target("a"))].into(),
            ..MeshPlan::default()
        }
    }

    fn report(to: &str, up: u32, down: u32, total: u32) -> BTreeMap<String, Tunnels> {
        [(to.to_owned(), Tunnels { up, down, total })].into()
    }

    fn link(from: &str, to: &str, up: usize, down: usize, total: usize) -> BrokenTunnels {
        let (from, to) = (from.into(), to.into());
        BrokenTunnels {
            from,
            to,
            up,
            down,
            total,
        }
    }

    #[test]
    fn down_tunnels_are_summed_over_reporting_nodes() {
        let reports = [
            ("a".to_owned(), vec![report("b", 1, 1, 2), report("b", 0, 1, 2)]),
            ("b".to_owned(), vec![report("a", 2, 0, 2), BTreeMap::new()]),
        ];
        assert_eq!(find_broken(&mesh(), &reports.into()), [link("a", "b", 1, 2, 4)]);
        assert_eq!(find_broken(&mesh(), &BTreeMap::new()), []);
    }

    // threat: false-report
    #[test]
    fn false_report_is_limited_to_planned_members_and_peers() {
        let max = u32::MAX;
        let reports = [
            (
                "a".to_owned(),
                vec![
                    report("b", max, max, 0),
                    report("b", max, 1, max),
                    report("unknown", 0, 1, 1),
                    report("a", 0, 1, 1),
                ],
            ),
            ("unknown".to_owned(), vec![report("a", 0, 1, 1)]),
        ];
        assert_eq!(find_broken(&mesh(), &reports.into()), [link("a", "b", 1, 3, 4)]);
    }

    #[test]
    fn list_beyond_limit_keeps_links_with_most_tunnels_down() {
        let mut plan = MeshPlan::default();
        let mut reports = BTreeMap::new();
        for n in 0..300 {
            let name = format!("m{n:03}");
            let target = mesh().targets.remove("a").expect("is there");
            plan.targets.insert(name.clone(), target);
            reports.insert(name, vec![report("b", 0, 1 + u32::from(n >= 100), 2)]);
        }
        let listed = find_broken(&plan, &reports);
        assert_eq!(listed.len(), MAX_LISTED);
        assert_eq!(listed.iter().filter(|link| link.down == 2).count(), 200);
        assert_eq!((&*listed[0].from, &*listed[255].from), ("m000", "m299"));
    }
}
