//! Between which members tunnels are down, from what their nodes say of themselves. A node's claims are hostile: they are
//! bounded by what the plan gave that member, and can only make its own links look worse or better.

use std::collections::BTreeMap;

use crate::plan::MeshPlan;

/// What one node says of its tunnels to one member; the rest of `total` is idle or new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tunnels {
    /// With a live session.
    pub up: u32,
    /// That should have one and have none.
    pub down: u32,
    /// All.
    pub total: u32,
}

/// Two members between which tunnels are down.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Broken {
    /// Entry whose nodes say so.
    pub from: String,
    /// Entry at the other end.
    pub to: String,
    /// Tunnels with a live session, on the nodes that say so.
    pub up: usize,
    /// Tunnels that should have one and have none.
    pub down: usize,
    /// All tunnels to that member on the nodes that say so.
    pub total: usize,
}

/// How many links are listed: what the CRD takes.
const LISTED: usize = 256;

/// The links with a tunnel down, sorted. `said` = for each entry, what each of its nodes says of the others, by entry. Names
/// of no entry are ignored, and so is what a node says of its own cluster; beyond 256 the worst are listed.
#[must_use]
pub fn broken(plan: &MeshPlan, said: &BTreeMap<String, Vec<BTreeMap<String, Tunnels>>>) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (from, nodes) in said {
        let Some(target) = plan.targets.get(from) else { continue };
        let mut peers: BTreeMap<&str, usize> = BTreeMap::new();
        for peer in target.peers.values() {
            *peers.entry(&peer.source).or_default() += 1;
        }
        for (to, most) in peers.into_iter().filter(|(to, _)| to != from) {
            let mut link = Broken {
                from: from.clone(),
                to: to.to_owned(),
                up: 0,
                down: 0,
                total: 0,
            };
            for tunnels in nodes.iter().filter_map(|node| node.get(to)) {
                let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
                let down = count(tunnels.down).min(most);
                if down == 0 {
                    continue;
                }
                let up = count(tunnels.up).min(most - down);
                link.down += down;
                link.up += up;
                link.total += count(tunnels.total).clamp(down + up, most);
            }
            if link.down > 0 {
                broken.push(link);
            }
        }
    }
    broken.sort_by(|a, b| b.down.cmp(&a.down).then_with(|| a.cmp(b)));
    broken.truncate(LISTED);
    broken.sort();
    broken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key::PublicKey,
        observe::PeerSpec,
        plan::{PlannedPeer, TargetPlan},
    };

    /// Two nodes each in `a` and `b`.
    fn mesh() -> MeshPlan {
        let target = |source: &str| {
            let peer = |node: &str| PlannedPeer {
                source: source.into(),
                node: node.into(),
                spec: PeerSpec {
                    public_key: PublicKey::new([1; 32]),
                    allowed_ips: Default::default(),
                    endpoint: None,
                    candidates: Vec::new(),
                    persistent_keepalive: 0,
                },
            };
            TargetPlan {
                peers: ["1", "2"].map(|node| (node.to_owned(), peer(node))).into(),
                ..TargetPlan::default()
            }
        };
        MeshPlan {
            targets: [("a".to_owned(), target("b")), ("b".to_owned(), target("a"))].into(),
            ..MeshPlan::default()
        }
    }

    fn says(to: &str, up: u32, down: u32, total: u32) -> BTreeMap<String, Tunnels> {
        [(to.to_owned(), Tunnels { up, down, total })].into()
    }

    fn link(from: &str, to: &str, up: usize, down: usize, total: usize) -> Broken {
        let (from, to) = (from.into(), to.into());
        Broken {
            from,
            to,
            up,
            down,
            total,
        }
    }

    #[test]
    fn tunnels_that_are_down_are_summed_over_the_nodes_that_say_so() {
        let said = [
            ("a".to_owned(), vec![says("b", 1, 1, 2), says("b", 0, 1, 2)]),
            ("b".to_owned(), vec![says("a", 2, 0, 2), BTreeMap::new()]),
        ];
        assert_eq!(broken(&mesh(), &said.into()), [link("a", "b", 1, 2, 4)]);
        assert_eq!(broken(&mesh(), &BTreeMap::new()), []);
    }

    #[test]
    fn a_node_that_lies_names_no_member_that_is_not_there_and_no_tunnel_that_was_not_given() {
        let most = u32::MAX;
        let said = [
            (
                "a".to_owned(),
                vec![
                    says("b", most, most, 0),
                    says("b", most, 1, most),
                    says("nobody", 0, 1, 1),
                    says("a", 0, 1, 1),
                ],
            ),
            ("nobody".to_owned(), vec![says("a", 0, 1, 1)]),
        ];
        assert_eq!(broken(&mesh(), &said.into()), [link("a", "b", 1, 3, 4)]);
    }

    #[test]
    fn beyond_what_the_status_takes_the_worst_are_listed() {
        let mut plan = MeshPlan::default();
        let mut said = BTreeMap::new();
        for n in 0..300 {
            let name = format!("m{n:03}");
            let target = mesh().targets.remove("a").expect("is there");
            plan.targets.insert(name.clone(), target);
            said.insert(name, vec![says("b", 0, 1 + u32::from(n >= 100), 2)]);
        }
        let listed = broken(&plan, &said);
        assert_eq!(listed.len(), LISTED);
        assert_eq!(listed.iter().filter(|link| link.down == 2).count(), 200);
        assert_eq!((&*listed[0].from, &*listed[255].from), ("m000", "m299"));
    }
}
