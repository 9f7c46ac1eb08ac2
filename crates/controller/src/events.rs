//! Events on ClusterMeshes: one for each change of what is said of something, not one for each pass. What is said is
//! decided in [`crate::report`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use clustermesh_api::mesh::ClusterMesh;
use clustermesh_core::mesh::MeshId;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};

/// The longest note the API takes.
const NOTE: usize = 1024;
/// Events of one pass for one mesh, at most: a thousand nodes that are skipped at once are one piece of news.
const AT_ONCE: usize = 20;

/// For one Event: nothing waits for it.
const REQUEST: Duration = Duration::from_secs(5);

/// Something that is said of a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Saying {
    /// What it is about; one saying a topic stands at a time. `Ready`, `node tenant-a/worker-1`.
    pub(crate) topic: String,
    /// One word; news is a topic with another word.
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

/// What has been said already, by mesh.
#[derive(Debug, Default)]
pub(crate) struct Said(BTreeMap<MeshId, BTreeMap<String, String>>);

impl Said {
    /// What of `sayings` is news; remembers them. Topics that are no longer spoken of are forgotten, so that they are
    /// news when they return. `before` = what an earlier controller left in the status, asked for once a mesh.
    fn news(
        &mut self,
        mesh: &MeshId,
        sayings: Vec<Saying>,
        before: impl FnOnce() -> BTreeMap<String, String>,
    ) -> Vec<Saying> {
        let said = self.0.entry(mesh.clone()).or_insert_with(before);
        let topics: BTreeSet<&String> = sayings.iter().map(|saying| &saying.topic).collect();
        said.retain(|topic, _| topics.contains(topic));
        sayings
            .into_iter()
            .filter(|saying| said.insert(saying.topic.clone(), saying.reason.clone()).as_ref() != Some(&saying.reason))
            .collect()
    }

    /// Forgets meshes that are gone.
    pub(crate) fn keep(&mut self, meshes: &BTreeSet<MeshId>) {
        self.0.retain(|mesh, _| meshes.contains(mesh));
    }
}

/// Publishes what is news.
pub(crate) struct Speaker {
    recorder: Recorder,
    said: Said,
}

impl Speaker {
    pub(crate) fn new(client: Client, instance: Option<String>) -> Self {
        let reporter = Reporter {
            controller: "clustermesh-controller".into(),
            instance,
        };
        Self {
            recorder: Recorder::new(client, reporter),
            said: Said::default(),
        }
    }

    /// Says what is news; `false` = the hub's API did not answer. A saying that cannot be published is lost: the status
    /// holds it too.
    pub(crate) async fn speak(&mut self, id: &MeshId, mesh: &ClusterMesh, sayings: Vec<Saying>) -> bool {
        let news = self.said.news(id, sayings, || standing(mesh));
        let reference = mesh.object_ref(&());
        let more = news.len().saturating_sub(AT_ONCE);
        for saying in news.into_iter().take(AT_ONCE) {
            let event = Event {
                type_: if saying.warning {
                    EventType::Warning
                } else {
                    EventType::Normal
                },
                reason: saying.reason,
                note: Some(cut(&saying.message, NOTE)),
                action: saying.action.to_owned(),
                secondary: saying.node.map(|(cluster, name)| ObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Node".to_owned()),
                    name: Some(name),
                    field_path: Some(format!("spec.clusters[name={cluster}]")),
                    ..ObjectReference::default()
                }),
            };
            match tokio::time::timeout(REQUEST, self.recorder.publish(&event, &reference)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(mesh = %id, reason = event.reason, error = &error as &dyn std::error::Error, "no Event");
                }
                Err(_) => {
                    tracing::warn!(mesh = %id, reason = event.reason, "no Event, nor those after it: the hub does not answer");
                    return false;
                }
            }
        }
        if more > 0 {
            tracing::info!(mesh = %id, more, "more news than Events; see the status");
        }
        true
    }

    /// Forgets meshes that are gone.
    pub(crate) fn keep(&mut self, meshes: &BTreeSet<MeshId>) {
        self.said.keep(meshes);
    }
}

/// What the status says that an earlier controller wrote: a restart is no news.
fn standing(mesh: &ClusterMesh) -> BTreeMap<String, String> {
    let Some(status) = &mesh.status else {
        return BTreeMap::new();
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
    conditions.chain(nodes).chain(links).collect()
}

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

    fn saying(topic: &str, reason: &str) -> Saying {
        Saying {
            topic: topic.into(),
            reason: reason.into(),
            message: String::new(),
            warning: true,
            action: "Plan",
            node: None,
        }
    }

    fn topics(news: Vec<Saying>) -> Vec<String> {
        news.into_iter().map(|saying| saying.topic).collect()
    }

    #[test]
    fn a_thing_is_said_once_and_again_when_its_word_changes_or_it_returns() {
        let mesh = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        let mut said = Said::default();
        let mut news = |sayings| topics(said.news(&mesh, sayings, BTreeMap::new));
        assert_eq!(news(vec![saying("a", "X"), saying("b", "X")]), ["a", "b"]);
        assert_eq!(news(vec![saying("a", "X"), saying("b", "Y")]), ["b"]);
        assert_eq!(news(vec![saying("b", "Y")]), Vec::<String>::new());
        assert_eq!(news(vec![saying("a", "X"), saying("b", "Y")]), ["a"]);
    }

    #[test]
    fn what_an_earlier_controller_left_in_the_status_is_no_news() {
        let mesh = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        let mut said = Said::default();
        let before = || [("a".to_owned(), "X".to_owned())].into();
        assert_eq!(
            topics(said.news(&mesh, vec![saying("a", "X"), saying("b", "X")], before)),
            ["b"]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_hub_that_does_not_answer_delays_the_loop_by_one_event() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
        });
        let mut speaker = Speaker::new(Client::new(silent, "default"), None);
        let spec = clustermesh_api::mesh::ClusterMeshSpec {
            paused: false,
            clusters: vec![],
        };
        let mut object = ClusterMesh::new("m", spec);
        object.metadata.namespace = Some("ns".into());
        let id = MeshId {
            namespace: "ns".into(),
            name: "m".into(),
        };
        let news = (0..AT_ONCE).map(|n| saying(&n.to_string(), "X")).collect();
        let began = tokio::time::Instant::now();
        let spoken = tokio::time::timeout(Duration::from_secs(3600), speaker.speak(&id, &object, news)).await;
        assert_eq!((spoken, began.elapsed()), (Ok(false), REQUEST));
    }

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("aéééé", 6), "aé…");
    }
}
