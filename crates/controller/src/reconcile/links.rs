//! Broken links as they are told: numbers that move are told at most every [`EVERY`], so that an outage which a thousand
//! nodes report one after the other is not a thousand writes. What is broken is decided in [`clustermesh_core::links`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{links::Broken, mesh::MeshId};

/// As often as an agent tells it.
const EVERY: Duration = Duration::from_secs(10);

/// What was told of each mesh that has, or lately had, broken links.
#[derive(Debug, Default)]
pub(super) struct Links(BTreeMap<MeshId, Told>);

#[derive(Debug)]
struct Told {
    links: Vec<Broken>,
    since: Instant,
    /// Something else is true by now.
    moved: bool,
}

impl Links {
    /// What to tell of a mesh of which `now` is true.
    pub(super) fn steady(&mut self, mesh: &MeshId, links: Vec<Broken>, now: Instant) -> Vec<Broken> {
        let fresh = |links: Vec<Broken>| Told {
            links,
            since: now,
            moved: false,
        };
        match self.0.get_mut(mesh) {
            None if links.is_empty() => {}
            None => drop(self.0.insert(mesh.clone(), fresh(links.clone()))),
            Some(told) if told.links == links => {
                told.moved = false;
                if links.is_empty() && now - told.since >= EVERY {
                    self.0.remove(mesh);
                }
            }
            Some(told) if now - told.since < EVERY => {
                told.moved = true;
                return told.links.clone();
            }
            Some(told) => *told = fresh(links.clone()),
        }
        links
    }

    /// When something is to be told that waits now.
    pub(super) fn due(&self) -> Option<Instant> {
        let waiting = self.0.values().filter(|told| told.moved);
        waiting.map(|told| told.since + EVERY).min()
    }

    /// Forgets meshes that are gone.
    pub(super) fn keep(&mut self, meshes: &BTreeSet<MeshId>) {
        self.0.retain(|mesh, _| meshes.contains(mesh));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_breaks_is_told_at_once_and_numbers_that_move_every_ten_seconds() {
        let mesh = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        let link = |down| Broken {
            from: "a".into(),
            to: "b".into(),
            up: 0,
            down,
            total: 9,
        };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut links = Links::default();
        let mut told = |second, now: Vec<Broken>| {
            let told = links.steady(&mesh, now, at(second));
            (told, links.due())
        };
        assert_eq!(told(0, vec![]), (vec![], None));
        assert_eq!(told(1, vec![link(1)]), (vec![link(1)], None));
        assert_eq!(told(2, vec![link(2)]), (vec![link(1)], Some(at(11))));
        assert_eq!(told(3, vec![link(1)]), (vec![link(1)], None), "as it was");
        assert_eq!(told(11, vec![link(3)]), (vec![link(3)], None));
        assert_eq!(
            told(12, vec![]),
            (vec![link(3)], Some(at(21))),
            "healed, and not flapping"
        );
        assert_eq!(told(21, vec![]), (vec![], None));
        assert_eq!(told(22, vec![link(1)]), (vec![], Some(at(31))));
        assert_eq!(told(31, vec![]), (vec![], None));
        assert_eq!(
            told(32, vec![link(1)]),
            (vec![link(1)], None),
            "quiet for long enough: at once"
        );
    }
}
