//! Remarks of `/readyz` about what cannot be written to the hub.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_daemon::{Readiness, ReadinessItem};

use super::{Queue, WriteKind};

/// The remarks that `/readyz` shows now.
#[derive(Default)]
pub(super) struct Remarks(BTreeMap<String, ReadinessItem>);

impl Remarks {
    pub(super) fn update(&mut self, queue: &Queue, readiness: &Readiness) {
        let problems = problems(queue);
        self.0.retain(|problem, _| problems.contains(problem));
        for problem in problems {
            let item = self.0.entry(problem);
            item.or_insert_with_key(|problem| readiness.remark(problem));
        }
    }
}

fn problems(queue: &Queue) -> BTreeSet<String> {
    let refused = queue.meshes.values().flat_map(|queued| &queued.blocked);
    let refused = refused.map(|(kind, code)| {
        let what = match kind {
            WriteKind::Finalizer => "the finalizer",
            WriteKind::Status => "the status",
            WriteKind::Events => "the Events",
        };
        format!(
            "status: the hub refuses {what} of a ClusterMesh ({code}): {}",
            remedy(*code)
        )
    });
    let outage =
        "status: the hub does not answer or asks to slow down: status and Events of ClusterMeshes are outdated";
    let outage = queue.outage.as_ref().map(|_| outage.to_owned());
    refused.chain(outage).collect()
}

/// What to do if the hub refuses a write with this status code.
const fn remedy(code: u16) -> &'static str {
    match code {
        401 | 403 => "apply deploy/controller.yaml",
        409 => "another client changes it all the time",
        422 => "apply crds/clustermeshes.kilo.squat.ai.yaml",
        _ => "see the log of its API server or of an admission webhook",
    }
}
