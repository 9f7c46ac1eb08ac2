//! Limits how often the broken links of a mesh change in its status.
//!
//! In an outage a thousand nodes may report their broken tunnels one after the other. Without a limit, each of them would change the
//! status. [`clustermesh_core::links`] decides which links are broken.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use clustermesh_core::{links::BrokenTunnels, mesh::MeshId};

/// The minimum time between two changes of the report of a mesh. An agent writes its status at most this often, too, and in large
/// clusters less often.
const INTERVAL: Duration = Duration::from_secs(10);

/// The last report of each mesh. A missing report counts as one without broken links that is at least [`INTERVAL`] old.
#[derive(Debug, Default)]
pub(super) struct LinkReports(BTreeMap<MeshId, LinkReport>);

#[derive(Debug)]
struct LinkReport {
    links: Vec<BrokenTunnels>,
    reported_at: Instant,
    /// The links have changed since the report.
    is_outdated: bool,
}

impl LinkReports {
    /// Returns the links to report for a mesh whose broken links are now `links`. If the last report is less than [`INTERVAL`] old,
    /// these are the links of the last report, else `links`.
    pub(super) fn throttle(&mut self, mesh: &MeshId, links: Vec<BrokenTunnels>, now: Instant) -> Vec<BrokenTunnels> {
        let new_report = |links: Vec<BrokenTunnels>| LinkReport {
            links,
            reported_at: now,
            is_outdated: false,
        };
        match self.0.get_mut(mesh) {
            None if links.is_empty() => {}
            None => drop(self.0.insert(mesh.clone(), new_report(links.clone()))),
            Some(report) if report.links == links => {
                report.is_outdated = false;
                if links.is_empty() && now - report.reported_at >= INTERVAL {
                    self.0.remove(mesh);
                }
            }
            Some(report) if now - report.reported_at < INTERVAL => {
                report.is_outdated = true;
                return report.links.clone();
            }
            Some(report) => *report = new_report(links.clone()),
        }
        links
    }

    /// The next time at which an outdated report may change.
    pub(super) fn due(&self) -> Option<Instant> {
        let outdated = self.0.values().filter(|report| report.is_outdated);
        outdated.map(|report| report.reported_at + INTERVAL).min()
    }

    /// Forgets all meshes except these.
    pub(super) fn keep(&mut self, meshes: &BTreeSet<MeshId>) {
        self.0.retain(|mesh, _| meshes.contains(mesh));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // threat: false-report
    #[test]
    fn report_of_links_changes_at_most_every_ten_seconds() {
        let mesh = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        let link = |down| BrokenTunnels {
            from: "a".into(),
            to: "b".into(),
            up: 0,
            down,
            total: 9,
        };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut reports = LinkReports::default();
        let mut report = |second, links: Vec<BrokenTunnels>| {
            let reported = reports.throttle(&mesh, links, at(second));
            (reported, reports.due())
        };
        assert_eq!(report(0, vec![]), (vec![], None));
        assert_eq!(report(1, vec![link(1)]), (vec![link(1)], None));
        assert_eq!(report(2, vec![link(2)]), (vec![link(1)], Some(at(11))));
        assert_eq!(report(3, vec![link(1)]), (vec![link(1)], None), "as in the last report");
        assert_eq!(report(11, vec![link(3)]), (vec![link(3)], None));
        assert_eq!(
            report(12, vec![]),
            (vec![link(3)], Some(at(21))),
            "a recovery is delayed, too"
        );
        assert_eq!(report(21, vec![]), (vec![], None));
        assert_eq!(report(22, vec![link(1)]), (vec![], Some(at(31))));
        assert_eq!(report(31, vec![]), (vec![], None));
        assert_eq!(
            report(32, vec![link(1)]),
            (vec![link(1)], None),
            "after ten seconds without broken links, no delay"
        );
    }
}
