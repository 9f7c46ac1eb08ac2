//! Events on ClusterMeshes: one for each change of a notice, not one for each pass. The notices are made in
//! [`crate::report`].

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use clustermesh_api::mesh::ClusterMesh;
use clustermesh_core::mesh::MeshId;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Error, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

use crate::trouble;

/// The longest note the API takes.
const NOTE: usize = 1024;
/// Events of one report of one mesh, at most.
const AT_ONCE: usize = 20;

/// For one Event.
const REQUEST: Duration = Duration::from_secs(5);

/// One fact about a mesh that an Event tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    /// What it is about; each topic has one notice at a time. `Ready`, `node tenant-a/worker-1`.
    pub(crate) topic: String,
    /// One word; a topic with another word is a new Event.
    pub(crate) reason: String,
    /// For a person.
    pub(crate) message: String,
    /// Something to mend, not just to know.
    pub(crate) warning: bool,
    /// What the controller did about it, one word.
    pub(crate) action: &'static str,
    /// The Node it is about: entry and name.
    pub(crate) node: Option<(String, String)>,
}

/// The notices of one mesh that had their Event: the reason by topic.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Reported(BTreeMap<String, String>);

impl Reported {
    /// What an earlier controller reported, as far as the status shows it: a restart is no reason for an Event. Whatever the
    /// spec alone decides was reported with its generation.
    pub(crate) fn before(mesh: &ClusterMesh, notices: &[Notice]) -> Self {
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
        let same_spec = status.observed_generation.is_some() && status.observed_generation == mesh.metadata.generation;
        let fields = notices
            .iter()
            .filter(|notice| same_spec && notice.reason == SPEC_ADJUSTED)
            .map(|notice| (notice.topic.clone(), notice.reason.clone()));
        Self(conditions.chain(nodes).chain(links).chain(fields).collect())
    }

    /// The notices that have had no Event. Topics that have no notice any more are forgotten, so that they have one when they
    /// return.
    pub(crate) fn news(&mut self, notices: &[Notice]) -> Vec<Notice> {
        let topics: BTreeSet<&String> = notices.iter().map(|notice| &notice.topic).collect();
        self.0.retain(|topic, _| topics.contains(topic));
        let news = notices
            .iter()
            .filter(|notice| self.0.get(&notice.topic) != Some(&notice.reason));
        news.cloned().collect()
    }

    /// This one had its Event.
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

    /// Publishes what is new, until the hub does not answer; which are done with, and why the rest is not. What it refuses, and
    /// those beyond the limit of one report, are in the status alone.
    pub(crate) async fn publish(
        &self,
        id: &MeshId,
        mesh: &Arc<ClusterMesh>,
        news: Vec<Notice>,
    ) -> (Vec<Notice>, Option<Error>) {
        let reference = mesh.object_ref(&());
        for (index, notice) in news.iter().take(AT_ONCE).enumerate() {
            let event = Event {
                type_: if notice.warning {
                    EventType::Warning
                } else {
                    EventType::Normal
                },
                reason: notice.reason.clone(),
                note: Some(cut(&notice.message, NOTE)),
                action: notice.action.to_owned(),
                secondary: notice.node.as_ref().map(|(cluster, name)| ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Node".to_owned()),
                    name: Some(name.clone()),
                    field_path: Some(format!("spec.clusters[name={cluster}]")),
                    ..ObjectReference::default()
                }),
            };
            let answer = match tokio::time::timeout(REQUEST, self.recorder.publish(&event, &reference)).await {
                Ok(answer) => answer,
                Err(elapsed) => Err(Error::Service(Box::new(elapsed))),
            };
            if let Err(error) = answer {
                tracing::warn!(mesh = %id, reason = event.reason, error = &error as &dyn std::error::Error, "Event not written");
                if trouble::is_of_the_cluster(&error) {
                    return (news[..index].to_vec(), Some(error));
                }
            }
        }
        let more = news.len().saturating_sub(AT_ONCE);
        if more > 0 {
            tracing::info!(mesh = %id, more, "more changes than Events; see the status");
        }
        (news, None)
    }
}

/// The reason for a value of the spec that was taken, but not as it was written.
pub(crate) const SPEC_ADJUSTED: &str = "SpecAdjusted";

/// The word for a link with tunnels down.
pub(crate) const TUNNELS_DOWN: &str = "TunnelsDown";

/// The topic of a link.
pub(crate) fn link_topic(from: &str, to: &str) -> String {
    format!("link {from}/{to}")
}

/// The topic of a Node.
pub(crate) fn node_topic(cluster: &str, node: &str) -> String {
    format!("node {cluster}/{node}")
}

/// At most `max` bytes of a text.
pub(crate) fn cut(text: &str, max: usize) -> String {
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
            warning: true,
            action: "Plan",
            node: None,
        }
    }

    /// The topics that are news; all of them are published.
    fn published(reported: &mut Reported, notices: &[Notice]) -> Vec<String> {
        let news = reported.news(notices);
        news.iter().for_each(|notice| reported.add(notice));
        news.into_iter().map(|notice| notice.topic).collect()
    }

    #[test]
    fn notice_is_news_once_until_its_reason_changes_or_it_returns() {
        let mut reported = Reported::default();
        let mut news = |notices: &[Notice]| published(&mut reported, notices);
        assert_eq!(news(&[notice("a", "X"), notice("b", "X")]), ["a", "b"]);
        assert_eq!(news(&[notice("a", "X"), notice("b", "Y")]), ["b"]);
        assert_eq!(news(&[notice("b", "Y")]), Vec::<String>::new());
        assert_eq!(news(&[notice("a", "X"), notice("b", "Y")]), ["a"]);
    }

    #[test]
    fn unpublished_notice_stays_news() {
        let mut reported = Reported::default();
        assert_eq!(reported.news(&[notice("a", "X")]), [notice("a", "X")]);
        assert_eq!(reported.news(&[notice("a", "X")]), [notice("a", "X")]);
    }

    fn mesh(status: serde_json::Value) -> ClusterMesh {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh",
            "metadata": {"name": "m", "namespace": "ns", "generation": 7}, "spec": {"clusters": []}, "status": status,
        }))
        .expect("a ClusterMesh")
    }

    #[test]
    fn restart_with_nothing_changed_has_no_news() {
        let notices = [
            notice("Ready", "Meshed"),
            notice("node a/n", "NodeNoPodCIDR"),
            notice("link a/b", TUNNELS_DOWN),
            notice("field spec.clusters[0].allowedNetworks[0]", SPEC_ADJUSTED),
        ];
        let status = |generation: i64| {
            serde_json::json!({
                "observedGeneration": generation,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Meshed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
                "clusters": [{"name": "a", "skipped": [{"node": "n", "reason": "NodeNoPodCIDR", "message": ""}]}],
                "brokenLinks": [{"from": "a", "to": "b", "up": 0, "total": 1}],
            })
        };
        let news = |status| Reported::before(&mesh(status), &notices).news(&notices);
        assert_eq!(news(status(7)), []);
        assert_eq!(news(status(6)), [notices[3].clone()], "the spec changed meanwhile");
        assert_eq!(news(serde_json::Value::Null), notices);
    }

    #[test]
    fn text_is_cut_at_a_character() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("aéééé", 6), "aé…");
    }
}
