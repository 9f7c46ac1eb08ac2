//! Publishes Kubernetes Events on ClusterMeshes: one Event when the reason of a notice changes, not for each pass. [`crate::report`]
//! makes the notices.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use clustermesh_api::{
    mesh::ClusterMesh,
    names::{FORCE_CLEANUP, LABEL_MESH},
};
use clustermesh_core::mesh::MeshId;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Error, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use crate::{
    api_error,
    expiry::{EXPIRED, EXPIRING},
};

/// The longest note that the API accepts.
const MAX_NOTE: usize = 1024;
/// The maximum number of Events that one call of [`EventPublisher::publish`] writes.
const MAX_EVENTS: usize = 20;

/// Timeout of the request for one Event.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// One condition or other state in a mesh. A new reason is published as an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The subject, for example `Ready` or `node tenant-a/worker-1`. Each topic has at most one notice at a time.
    pub(crate) topic: String,
    /// One word. A notice whose reason differs from the last reason of its topic is a new Event.
    pub(crate) reason: String,
    /// The Event's text for people.
    pub(crate) message: String,
    /// Whether the Event's type is Warning, because a person has to act.
    pub(crate) is_warning: bool,
    /// The Event's `action`: one word for what the controller did.
    pub(crate) action: &'static str,
    /// The Node that the notice is about: the name of its cluster's entry in the mesh, and the name of the Node.
    pub(crate) node: Option<(String, String)>,
}

impl Notice {
    /// Objects of a mesh stay in `clusters` for ever, because the annotation `force-cleanup` allows it.
    pub(crate) fn objects_left(mesh: &MeshId, clusters: &str) -> Self {
        Self {
            topic: format!("left {clusters}"),
            reason: "ObjectsLeft".to_owned(),
            message: format!(
                "objects of this mesh are left in cluster {clusters}, as the annotation {FORCE_CLEANUP} allows; those with the label \
                 {LABEL_MESH}={} can be deleted there",
                mesh.name
            ),
            is_warning: true,
            action: "GiveUp",
            node: None,
        }
    }
}

/// The notices of one mesh that need no Event any more: the last reason of each topic. The code calls them published, but some
/// have no Event: the hub refused it, or there were more than [`MAX_EVENTS`] notices.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reported(BTreeMap<String, String>);

impl Reported {
    /// Derives the published notices from the status that an earlier process wrote, so that a restart repeats no Events. Notices
    /// that depend only on the spec count as published if the status has the generation of the spec.
    pub(crate) fn from_status(mesh: &ClusterMesh, notices: &[Notice]) -> Self {
        let Some(status) = &mesh.status else {
            return Self::default();
        };
        let conditions = status.conditions.iter().map(|c| (c.type_.clone(), c.reason.clone()));
        let nodes = status.clusters.iter().flat_map(|cluster| {
            cluster
                .skipped
                .iter()
                .map(move |skip| (node_topic(&cluster.name, &skip.node), skip.reason.clone()))
        });
        let links = status.broken_links.iter();
        let links = links.map(|link| (link_topic(&link.from, &link.to), TUNNELS_DOWN.to_owned()));
        let problems = status.problems.iter();
        let problems = problems.filter(|problem| [EXPIRING, EXPIRED].contains(&&*problem.reason));
        let credentials = problems.filter_map(|problem| {
            let topic = credentials_topic(problem.cluster.as_ref()?);
            Some((topic, problem.reason.clone()))
        });
        let same_spec = status.observed_generation.is_some() && status.observed_generation == mesh.metadata.generation;
        let fields = notices
            .iter()
            .filter(|notice| same_spec && notice.reason == SPEC_ADJUSTED)
            .map(|notice| (notice.topic.clone(), notice.reason.clone()));
        Self(
            conditions
                .chain(nodes)
                .chain(links)
                .chain(credentials)
                .chain(fields)
                .collect(),
        )
    }

    /// Returns the notices whose topic has no published notice, or one with another reason. Forgets the topics that `notices` does not
    /// contain, so a topic that returns is published again.
    pub(crate) fn unpublished(&mut self, notices: &[Notice]) -> Vec<Notice> {
        let topics: BTreeSet<&String> = notices.iter().map(|notice| &notice.topic).collect();
        self.0.retain(|topic, _| topics.contains(topic));
        let unpublished = notices
            .iter()
            .filter(|notice| self.0.get(&notice.topic) != Some(&notice.reason));
        unpublished.cloned().collect()
    }

    /// Marks a notice as published.
    pub(crate) fn add(&mut self, notice: &Notice) {
        self.0.insert(notice.topic.clone(), notice.reason.clone());
    }
}

/// Publishes notices as Events.
pub(crate) struct EventPublisher {
    recorder: Recorder,
}

impl EventPublisher {
    pub(crate) fn new(client: Client, instance: Option<String>) -> Self {
        let reporter = Reporter {
            controller: "clustermesh-controller".into(),
            instance,
        };
        Self {
            recorder: Recorder::new(client, reporter),
        }
    }

    /// Publishes the notices in order, and stops at an error that would also affect the next ones, for example if the hub does not
    /// answer. Returns the notices that need no further attempt, and the error that stopped the publication.
    ///
    /// A notice that the hub refuses, or that exceeds [`MAX_EVENTS`], needs no further attempt: the status contains all
    /// notices but those with the reason [`SPEC_ADJUSTED`].
    pub(crate) async fn publish(
        &self,
        id: &MeshId,
        mesh: &Arc<ClusterMesh>,
        notices: Vec<Notice>,
    ) -> (Vec<Notice>, Option<Error>) {
        let reference = mesh.object_ref(&());
        for (index, notice) in notices.iter().take(MAX_EVENTS).enumerate() {
            let event = Event {
                type_: if notice.is_warning {
                    EventType::Warning
                } else {
                    EventType::Normal
                },
                reason: notice.reason.clone(),
                note: Some(truncate(&notice.message, MAX_NOTE)),
                action: notice.action.to_owned(),
                secondary: notice.node.as_ref().map(|(cluster, name)| ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Node".to_owned()),
                    name: Some(name.clone()),
                    field_path: Some(format!("spec.clusters[name={cluster}]")),
                    ..ObjectReference::default()
                }),
            };
            let answer = match tokio::time::timeout(REQUEST_TIMEOUT, self.recorder.publish(&event, &reference)).await {
                Ok(answer) => answer,
                Err(elapsed) => Err(Error::Service(Box::new(elapsed))),
            };
            if let Err(error) = answer {
                tracing::warn!(mesh = %id, reason = event.reason, error = &error as &dyn std::error::Error, "Event not written");
                if api_error::is_cluster_wide(&error) {
                    return (notices[..index].to_vec(), Some(error));
                }
            }
        }
        let more = notices.len().saturating_sub(MAX_EVENTS);
        if more > 0 {
            tracing::info!(mesh = %id, more, "more changes than Events; see the status");
        }
        (notices, None)
    }
}

/// The Event reason for a value of the spec that was accepted in another form, for example a CIDR without its host bits.
pub(crate) const SPEC_ADJUSTED: &str = "SpecAdjusted";

/// The Event reason for a link with tunnels down.
pub(crate) const TUNNELS_DOWN: &str = "TunnelsDown";

/// The topic of a link between two entries.
pub(crate) fn link_topic(from: &str, to: &str) -> String {
    format!("link {from}/{to}")
}

/// The topic of the credentials of an entry.
pub(crate) fn credentials_topic(cluster: &str) -> String {
    format!("credentials {cluster}")
}

/// The topic of a Node.
pub(crate) fn node_topic(cluster: &str, node: &str) -> String {
    format!("node {cluster}/{node}")
}

/// Shortens a text to at most `max` bytes, at a character boundary.
pub(crate) fn truncate(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let mut end = max.saturating_sub('…'.len_utf8());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(topic: &str, reason: &str) -> Notice {
        Notice {
            topic: topic.into(),
            reason: reason.into(),
            message: String::new(),
            is_warning: true,
            action: "Plan",
            node: None,
        }
    }

    /// Marks the unpublished notices as published and returns their topics.
    fn publish(reported: &mut Reported, notices: &[Notice]) -> Vec<String> {
        let unpublished = reported.unpublished(notices);
        unpublished.iter().for_each(|notice| reported.add(notice));
        unpublished.into_iter().map(|notice| notice.topic).collect()
    }

    #[test]
    fn notice_with_new_reason_or_after_a_gap_is_published_again() {
        let mut reported = Reported::default();
        let mut publish = |notices: &[Notice]| publish(&mut reported, notices);
        assert_eq!(publish(&[notice("a", "X"), notice("b", "X")]), ["a", "b"]);
        assert_eq!(publish(&[notice("a", "X"), notice("b", "Y")]), ["b"]);
        assert_eq!(publish(&[notice("b", "Y")]), Vec::<String>::new());
        assert_eq!(publish(&[notice("a", "X"), notice("b", "Y")]), ["a"]);
    }

    #[test]
    fn notice_that_was_not_published_stays_unpublished() {
        let mut reported = Reported::default();
        assert_eq!(reported.unpublished(&[notice("a", "X")]), [notice("a", "X")]);
        assert_eq!(reported.unpublished(&[notice("a", "X")]), [notice("a", "X")]);
    }

    fn mesh(status: serde_json::Value) -> ClusterMesh {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": "m", "namespace": "ns", "generation": 7}, "spec": {"clusters": []}, "status": status,
        }))
        .expect("a ClusterMesh")
    }

    #[test]
    fn restart_repeats_no_event_that_the_status_shows() {
        let notices = [
            notice("Ready", "Meshed"),
            notice("node a/n", "NodeNoPodCIDR"),
            notice("link a/b", TUNNELS_DOWN),
            notice("credentials a", EXPIRING),
            notice("field spec.clusters[0].allowedNetworks[0]", SPEC_ADJUSTED),
        ];
        let status = |generation: i64| {
            serde_json::json!({
                "observedGeneration": generation,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Meshed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "clusters": [{"name": "a", "skipped": [{"node": "n", "reason": "NodeNoPodCIDR", "message": ""}]}],
                "problems": [{"condition": "Degraded", "reason": EXPIRING, "cluster": "a", "since": "2026-01-01T00:00:00Z"}],
                "brokenLinks": [{"from": "a", "to": "b", "up": 0, "total": 1}],
            })
        };
        let unpublished = |status| Reported::from_status(&mesh(status), &notices).unpublished(&notices);
        assert_eq!(unpublished(status(7)), []);
        assert_eq!(
            unpublished(status(6)),
            [notices[4].clone()],
            "the spec changed in the meantime"
        );
        assert_eq!(unpublished(serde_json::Value::Null), notices);
    }

    #[test]
    fn truncated_text_ends_at_a_character_boundary() {
        assert_eq!(truncate("abc", 3), "abc");
        assert_eq!(truncate("aéééé", 6), "aé…");
    }
}
