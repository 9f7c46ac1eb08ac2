use clustermesh_core::observe::{Claim, Member, Node, Observation};

use super::*;

fn address_set(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

fn member(name: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: name.into(),
        key: "value".into(),
        context: None,
    }
}

#[test]
fn name_with_several_addresses_keeps_the_one_in_use() {
    let (two, three) = ("192.0.2.2".parse().ok(), "192.0.2.3".parse().ok());
    assert_eq!(choose(None, Some(&address_set(&["192.0.2.3", "192.0.2.2"]))), two);
    assert_eq!(choose(three, Some(&address_set(&["192.0.2.3", "192.0.2.2"]))), three);
    assert_eq!(choose(three, Some(&address_set(&["192.0.2.2"]))), two);
}

#[test]
fn failed_lookup_changes_nothing() {
    let three = "192.0.2.3".parse().ok();
    assert_eq!(choose(three, None), three);
    assert_eq!(choose(three, Some(&address_set(&[]))), three);
    assert_eq!(choose(None, None), None);
}

/// Two hundred names do not resolve. While they are looked up, a name of another member is added.
#[tokio::test(start_paused = true)]
async fn silent_names_delay_other_members_by_one_timeout_at_most() {
    let silent: BTreeSet<String> = (0..MAX_NAMES).map(|n| format!("silent-{n:03}.example")).collect();
    let mut wanted: NamesByMember = [(member("hostile"), silent.clone())].into();
    let (names, receiver) = watch::channel(wanted.clone());
    let (addresses, changed) = (Addresses::default(), Changed::default());
    let lookup = |name: String| async move {
        if name.starts_with("silent") {
            tokio::time::sleep(LOOKUP_TIMEOUT).await;
            return None;
        }
        Some(address_set(&["192.0.2.7"]))
    };
    tokio::spawn(run(receiver, Arc::clone(&addresses), changed.clone(), lookup));
    tokio::time::sleep(Duration::from_secs(1)).await;

    wanted.insert(member("honest"), ["node.example".to_owned()].into());
    let added = Instant::now();
    names.send_replace(wanted);
    changed.notified().await;
    assert!(added.elapsed() <= LOOKUP_TIMEOUT, "{:?}", added.elapsed());
    let resolved: Vec<(String, IpAddr)> = addresses.lock().expect("not poisoned").clone().into_iter().collect();
    assert_eq!(
        resolved,
        [("node.example".to_owned(), "192.0.2.7".parse().expect("an address"))]
    );
    assert_eq!(silent.len(), 200);

    // No name is wanted any more. After 6 s the last lookup has ended (`LOOKUP_TIMEOUT` is 5 s).
    names.send_replace(NamesByMember::new());
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(addresses.lock().expect("not poisoned").is_empty());
}

#[test]
fn queue_alternates_members_and_repeats_names_when_due() {
    let (mut queue, now) = (LookupQueue::default(), Instant::now());
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let wanted: NamesByMember = [(member("a"), names(&["1", "2", "3"])), (member("b"), names(&["4"]))].into();
    queue.set_names(&wanted, now);
    let order: Vec<String> = std::iter::from_fn(|| queue.next(now)).map(|(_, name)| name).collect();
    assert_eq!(order, ["1", "4", "2", "3"]);
    // A name in progress is not returned a second time. A name that was removed while in progress is not looked up again.
    queue.set_names(&[(member("a"), names(&["1", "2"]))].into(), now);
    assert_eq!(queue.next(now), None);
    let later = now + REFRESH;
    for (owner, name) in [("a", "3"), ("b", "4"), ("a", "1")] {
        queue.finish(&member(owner), name.to_owned(), later);
    }
    assert_eq!((queue.due(), queue.next(now)), (Some(later), None));
    assert_eq!(queue.next(later), Some((member("a"), "1".to_owned())));
    assert_eq!(queue.next(later), None);
}

#[test]
fn names_of_cluster_that_some_mesh_has_as_sandbox_are_left_out() {
    let mesh = |name: &str, profile: &str| {
        let object = serde_json::json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "ClusterMesh", "metadata": {"name": name, "namespace": "ns"},
            "spec": {"clusters": [
                {"name": "a", "kubeconfigSecretRef": {"name": "a"}, "isolationProfile": profile, "allowedNetworks": ["10.2.0.0/16"]},
                {"name": "b", "kubeconfigSecretRef": {"name": "b"}, "allowedNetworks": ["10.3.0.0/16"]},
            ]},
        });
        clustermesh_api::convert::mesh::to_core(&serde_json::from_value(object).unwrap())
            .unwrap()
            .0
    };
    let meshed = mesh("m", "cluster-meshed");
    let node = Node {
        force_endpoint: Claim::Valid(Endpoint::Dns("node.example".into(), 51820)),
        ..Default::default()
    };
    let observed = Member {
        nodes: [("n".to_owned(), node)].into(),
        ..Default::default()
    };
    let seen = Observations {
        members: [(meshed.clusters[0].identity.clone(), Observation::Fresh(observed))].into(),
        hub: "hub".into(),
        resolved: BTreeMap::new(),
    };
    let names = |meshes: &[Mesh]| collect_names(meshes, &seen).into_values().flatten().collect::<Vec<_>>();
    assert_eq!(names(std::slice::from_ref(&meshed)), ["node.example"]);
    assert!(names(&[meshed, mesh("n", "sandbox")]).is_empty());
}
