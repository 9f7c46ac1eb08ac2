//! Tests changes of profiles while the controller runs. The tests record every write and check the state after each one. When
//! the profile of a member gets stricter, the member must not be open (`Recorder::is_open`) after the first write for it or
//! any later one. No Peer may exist without the policy of its member.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use clustermesh_api::{mesh::IsolationProfile, peer::Peer, policy::PeerPolicy};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{SOON, TestEnv};
use futures::StreamExt;
use kube::{
    Api, ResourceExt,
    api::{ListParams, WatchEvent, WatchParams},
};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{gateways, sandbox};

/// One write of an object. `revision` is its resourceVersion.
#[derive(Debug, Clone)]
struct Write {
    revision: u64,
    name: String,
    /// `None` = the object was deleted.
    openness: Option<Openness>,
}

/// The part of an object's content that these tests check.
#[derive(Debug, Clone, PartialEq)]
enum Openness {
    /// Whether it has allowed IPs other than single addresses.
    Peer { wide: bool },
    /// Whether it is not closed: it has the profile cluster-meshed, or allows something.
    Policy { wide: bool },
}

/// Records every write of Peers and PeerPolicies in one cluster.
struct Recorder {
    writes: Arc<Mutex<Vec<Write>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

fn peer_openness(peer: &Peer) -> Openness {
    let host = |net: &str| net.ends_with("/32") || net.ends_with("/128");
    Openness::Peer {
        wide: !peer.spec.allowed_ips.iter().all(|net| host(net)),
    }
}

fn policy_openness(policy: &PeerPolicy) -> Openness {
    Openness::Policy {
        wide: policy.spec.isolation_profile == IsolationProfile::ClusterMeshed || !policy.spec.allow.is_empty(),
    }
}

fn revision(object: &impl ResourceExt) -> u64 {
    object.resource_version().unwrap().parse().unwrap()
}

/// Records the writes of one kind from its current resourceVersion on. Panics if the watch cannot be resumed.
async fn record<K>(api: Api<K>, writes: Arc<Mutex<Vec<Write>>>, classify: fn(&K) -> Openness)
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut from = api
        .list(&ListParams::default())
        .await
        .unwrap()
        .metadata
        .resource_version
        .unwrap();
    loop {
        let mut events = api.watch(&WatchParams::default(), &from).await.unwrap().boxed();
        while let Some(Ok(event)) = events.next().await {
            let (object, gone) = match &event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
                WatchEvent::Deleted(object) => (object, true),
                WatchEvent::Bookmark(_) => continue,
                WatchEvent::Error(error) => panic!("{error:?}"),
            };
            from = object.resource_version().unwrap();
            writes.lock().unwrap().push(Write {
                revision: revision(object),
                name: object.name_any(),
                openness: (!gone).then(|| classify(object)),
            });
        }
    }
}

impl Recorder {
    /// Starts recording in a cluster that has no Peer or PeerPolicy yet.
    async fn start(env: &TestEnv, cluster: &str) -> Self {
        let writes = Arc::<Mutex<Vec<Write>>>::default();
        let client = env.client(cluster).await;
        let peers = record(Api::<Peer>::all(client.clone()), Arc::clone(&writes), peer_openness);
        let policies = record(Api::<PeerPolicy>::all(client), Arc::clone(&writes), policy_openness);
        Self {
            writes,
            tasks: vec![tokio::spawn(peers), tokio::spawn(policies)],
        }
    }

    /// The writes of both kinds, in the order of their revisions.
    fn writes(&self) -> Vec<Write> {
        let mut writes = self.writes.lock().unwrap().clone();
        writes.sort_by_key(|write| write.revision);
        writes
    }

    /// The objects that exist after the first `count` writes.
    fn after(&self, count: usize) -> BTreeMap<String, Openness> {
        let mut objects = BTreeMap::new();
        for write in &self.writes()[..count] {
            let key = match &write.openness {
                Some(Openness::Peer { .. }) | None => format!("peer {}", write.name),
                Some(Openness::Policy { .. }) => format!("policy {}", write.name),
            };
            match &write.openness {
                Some(openness) => drop(objects.insert(key, openness.clone())),
                // A deletion does not record the kind. No Peer (`mesh--cluster--node`) has the name of a policy (`mesh--cluster`).
                None => {
                    objects.remove(&key);
                    objects.remove(&format!("policy {}", write.name));
                }
            }
        }
        objects
    }

    /// Waits until all existing objects have been recorded. Returns the number of writes.
    async fn wait_until_caught_up(&self, env: &TestEnv, cluster: &str) -> usize {
        wait_until(format!("every write in {cluster} to be recorded"), SOON, async || {
            let peers = env.peers(cluster).await;
            let policies = sandbox::policies(env, cluster).await;
            let mut listed: BTreeMap<String, Openness> = BTreeMap::new();
            listed.extend(
                peers
                    .iter()
                    .map(|(name, object)| (format!("peer {name}"), peer_openness(object))),
            );
            listed.extend(
                policies
                    .iter()
                    .map(|(name, object)| (format!("policy {name}"), policy_openness(object))),
            );
            let latest = peers
                .values()
                .map(revision)
                .chain(policies.values().map(revision))
                .max();
            let writes = self.writes();
            let recorded = writes.iter().map(|write| write.revision).max();
            if self.after(writes.len()) == listed && recorded >= latest {
                Ok(writes.len())
            } else {
                Err(format!("{listed:?} is not yet {:?}", self.after(writes.len())))
            }
        })
        .await
        .unwrap()
    }

    /// Whether a wide Peer of `source` exists while the policy of `source` is wide or missing.
    fn is_open(objects: &BTreeMap<String, Openness>, source: &str) -> bool {
        let peer = |(name, object): (&String, &Openness)| {
            name.starts_with(&format!("peer {source}--")) && *object == Openness::Peer { wide: true }
        };
        let policy = objects.get(&format!("policy {source}"));
        objects.iter().any(peer) && policy != Some(&Openness::Policy { wide: false })
    }

    /// Checks the writes between `first` and `last`: from the first write for `source` on, `source` is not open.
    fn assert_closed_from(&self, first: usize, last: usize, source: &str, what: &str) {
        let writes = self.writes();
        let of_source = |write: &Write| write.name == source || write.name.starts_with(&format!("{source}--"));
        let first_of_source = (first..last).find(|index| of_source(&writes[*index]));
        let Some(first_of_source) = first_of_source else {
            // No object of `source` existed in this cluster.
            assert!(!Self::is_open(&self.after(last), source), "{what}: nothing was written");
            return;
        };
        for count in first_of_source + 1..=last {
            let objects = self.after(count);
            assert!(
                !Self::is_open(&objects, source),
                "{what}: after write {count} ({:?}) of {:#?}",
                writes[count - 1],
                &writes[first..last]
            );
        }
    }

    /// Checks that no Peer ever existed without the policy of its member.
    fn assert_never_a_peer_without_its_policy(&self, cluster: &str) {
        let writes = self.writes();
        for count in 1..=writes.len() {
            let objects = self.after(count);
            for peer in objects.keys().filter_map(|name| name.strip_prefix("peer ")) {
                let source: Vec<&str> = peer.splitn(3, "--").take(2).collect();
                let policy = format!("policy {}", source.join("--"));
                assert!(
                    objects.contains_key(&policy),
                    "in {cluster}: {peer} without {policy} after {:?}",
                    writes[count - 1]
                );
            }
        }
    }
}

/// Gives `notebooks` a profile and one grant in the hub.
fn with_profile(mut mesh: Value, profile: &str) -> Value {
    let entry = &mut mesh["spec"]["clusters"][2];
    entry["isolationProfile"] = json!(profile);
    entry["egress"] = json!([{
        "service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres"}, "as": {"namespace": "default", "name": "db"},
    }]);
    mesh
}

async fn three_clusters() -> TestEnv {
    let env = TestEnv::start(&["mgmt", "tenant-a", "notebooks"]).await;
    for (m, name) in [(1, "mgmt"), (2, "tenant-a"), (3, "notebooks")] {
        env.create_node(name, m, 1).await;
        env.create_node(name, m, 2).await;
    }
    sandbox::create_service(&env, "mgmt", "team-x", "postgres", 5432, ("10.1.2.9", "mgmt-2")).await;
    gateways::install(&env, "mgmt", 1).await;
    env
}

/// Waits until a cluster has `peers.0` Peers of `source`, and all of them are wide (`peers.1`) or none is. The policy of
/// `source` must be wide (`Some(true)`), not wide (`Some(false)`) or missing (`None`).
async fn until_peers_and_policy(
    env: &TestEnv,
    cluster: &str,
    source: &str,
    peers: (usize, bool),
    policy: Option<bool>,
) {
    let what = format!("{cluster} to have Peers {peers:?} of {source}, policy {policy:?}");
    wait_until(what, SOON, async || {
        let all = env.peers(cluster).await;
        let own = all.iter().filter(|(name, _)| name.starts_with(&format!("{source}--")));
        let own: Vec<bool> = own
            .map(|(_, object)| peer_openness(object) == Openness::Peer { wide: true })
            .collect();
        let policies = sandbox::policies(env, cluster).await;
        let is_wide = policies
            .get(source)
            .map(|object| policy_openness(object) == Openness::Policy { wide: true });
        if own == vec![peers.1; peers.0] && is_wide == policy {
            Ok(())
        } else {
            Err(format!("{own:?}, policy {is_wide:?}"))
        }
    })
    .await
    .unwrap();
}

// threat: profile-tightened
#[tokio::test]
async fn stricter_profile_closes_first_and_no_peer_lacks_a_policy() {
    const SOURCE: &str = "prod--notebooks";
    let env = three_clusters().await;
    let clusters = ["mgmt", "tenant-a", "notebooks"];
    let mut recorders = Vec::new();
    for cluster in clusters {
        recorders.push(Recorder::start(&env, cluster).await);
    }
    let _controller = env.start_controller().await;
    let tightness = |profile| {
        ["cluster-meshed", "sandbox", "standard"]
            .iter()
            .position(|one| *one == profile)
    };
    let mut before = None;
    for profile in [
        "cluster-meshed",
        "sandbox",
        "standard",
        "cluster-meshed",
        "standard",
        "sandbox",
        "cluster-meshed",
    ] {
        let mut first = Vec::new();
        for (recorder, cluster) in recorders.iter().zip(clusters) {
            first.push(recorder.wait_until_caught_up(&env, cluster).await);
        }
        env.apply_mesh(&with_profile(env.mesh(), profile)).await;
        // Expected objects: of `notebooks` in the hub, of `notebooks` in tenant-a, of the hub in `notebooks`.
        let (hub, tenant, own) = match profile {
            "cluster-meshed" => (
                ((2, true), Some(true)),
                ((2, true), Some(true)),
                ((2, true), Some(true)),
            ),
            // In `notebooks` the Peers are the gateways of the hub. Their policy allows nothing but replies. It counts as wide because
            // its profile is cluster-meshed.
            "sandbox" => (((0, false), None), ((0, false), None), ((2, false), Some(true))),
            _ => (((0, false), None), ((0, false), None), ((0, false), None)),
        };
        until_peers_and_policy(&env, "mgmt", SOURCE, hub.0, hub.1).await;
        until_peers_and_policy(&env, "tenant-a", SOURCE, tenant.0, tenant.1).await;
        until_peers_and_policy(&env, "notebooks", "prod--mgmt", own.0, own.1).await;
        until_peers_and_policy(&env, "tenant-a", "prod--mgmt", (2, true), Some(true)).await;
        let tightened = before.is_some_and(|before| tightness(profile) > tightness(before));
        for ((recorder, cluster), first) in recorders.iter().zip(clusters).zip(first) {
            let last = recorder.wait_until_caught_up(&env, cluster).await;
            assert!(
                last > first || profile != "cluster-meshed",
                "nothing was recorded in {cluster}"
            );
            if tightened && cluster != "notebooks" {
                let what = format!("{} to {profile} in {cluster}", before.unwrap_or_default());
                recorder.assert_closed_from(first, last, SOURCE, &what);
            }
        }
        before = Some(profile);
    }
    for (recorder, cluster) in recorders.iter().zip(clusters) {
        recorder.assert_never_a_peer_without_its_policy(cluster);
    }
}

// threat: profile-conflict
#[tokio::test]
async fn tighter_profile_of_two_meshes_wins_and_is_reported() {
    let env = three_clusters().await;
    let recorder = Recorder::start(&env, "mgmt").await;
    let _controller = env.start_controller().await;
    env.apply_mesh(&with_profile(env.mesh(), "cluster-meshed")).await;
    until_peers_and_policy(&env, "mgmt", "prod--notebooks", (2, true), Some(true)).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;

    // Another mesh makes `notebooks` a sandbox. It is then a sandbox in both meshes, with the grants of both.
    let first = recorder.wait_until_caught_up(&env, "mgmt").await;
    let mut other = with_profile(env.mesh(), "sandbox");
    other["metadata"]["name"] = json!("other");
    other["spec"]["clusters"].as_array_mut().unwrap().remove(1);
    let entry = &mut other["spec"]["clusters"][1];
    entry["egress"][0]["as"]["name"] = json!("db-too");
    env.apply_mesh(&other).await;
    until_peers_and_policy(&env, "mgmt", "prod--notebooks", (0, false), None).await;
    until_peers_and_policy(&env, "tenant-a", "prod--notebooks", (0, false), None).await;
    let message = env.until_condition("Ready", "False/ProfileConflict", SOON).await;
    assert!(
        message.contains(
            "is cluster-meshed here and sandbox in ClusterMesh clustermesh/other; the more restrictive one applies"
        ),
        "{message}"
    );
    let last = recorder.wait_until_caught_up(&env, "mgmt").await;
    recorder.assert_closed_from(first, last, "prod--notebooks", "a second mesh in which it is a sandbox");

    // When the other mesh is deleted, the profile of the first one is in effect again.
    let words = ["delete", "cmesh", "other", "-n", NAMESPACE, "--wait=false"];
    env.hub().kubectl(words).await.unwrap();
    until_peers_and_policy(&env, "mgmt", "prod--notebooks", (2, true), Some(true)).await;
    until_peers_and_policy(&env, "tenant-a", "prod--notebooks", (2, true), Some(true)).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
}
