//! Tests that an invalid claim of a Node excludes only that Node, or only the claimed endpoint or prefix, and that status,
//! `clustermeshctl plan` and `clustermeshctl explain` give the reason.

use std::collections::BTreeMap;

use clustermesh_api::{names, peer::Peer};
use clustermesh_lab::wait_until;
use clustermesh_tests::test_env::{EVENTS, SOON, TestEnv, key};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use crate::operator::{self, clustermeshctl};

/// Nodes that get no Peer: the number of the Node, the reason and the message.
const SKIPPED: [(u8, &str, &str); 12] = [
    (
        12,
        "PublicKeyDuplicate",
        "key AQEHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc= belongs to Node mgmt-1 of cluster \"mgmt\"; one of the two is a copy",
    ),
    (
        13,
        "PublicKeyDuplicate",
        "toward cluster \"mgmt\": key CQkHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc= belongs to Peer laptop there",
    ),
    (
        14,
        "PublicKeyDuplicate",
        "key AgEHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc= belongs to Node tenant-a-1; one of the two is a copy",
    ),
    (
        15,
        "PublicKeyInvalid",
        "annotation kilo.squat.ai/key: \"no key\" is not a WireGuard public key: expected 44 characters of base64 that hold 32 bytes, \
         as `wg pubkey` prints",
    ),
    (
        16,
        "PodCIDRDuplicate",
        "podCIDR 10.2.0.0/20 overlaps 10.2.1.0/24, which belongs to Node tenant-a-1",
    ),
    (
        2,
        "EndpointForbidden",
        "annotation clustermesh-endpoint is 127.0.0.1:51820, a loopback address; name an address that the other members reach",
    ),
    (
        3,
        "EndpointForbidden",
        "annotation force-endpoint is [fe80::1]:51820, a link-local address; name an address that the other members reach",
    ),
    (
        4,
        "EndpointForbidden",
        "annotation clustermesh-endpoint is 224.0.0.5:51820, a multicast address; name an address that the other members reach",
    ),
    (
        5,
        "EndpointForbidden",
        "annotation force-endpoint is 0.0.0.0:51820, the unspecified address; name an address that the other members reach",
    ),
    (
        6,
        "EndpointForbidden",
        "toward cluster \"mgmt\": annotation clustermesh-endpoint gives 10.1.7.7:51820, which lies inside the target's own networks; \
         if this is intended, list its network in endpointNetworks of cluster \"tenant-a\"",
    ),
    (
        7,
        "WGIPDuplicate",
        "WireGuard address 100.64.2.1 belongs to Node tenant-a-1",
    ),
    (8, "PodCIDRDuplicate", "podCIDR 10.2.1.0/24 belongs to Node tenant-a-1"),
];

/// Creates the Nodes of tenant-a. Only Node 1 is entirely valid. It counts as the oldest, also among Nodes that are created in
/// the same second, because its name comes first.
async fn create_nodes(env: &TestEnv) {
    let annotate = |node: &mut Value, name: &str, value: &str| node["metadata"]["annotations"][name] = json!(value);
    let create = async |n: u8, change: &dyn Fn(&mut Value)| {
        env.create_changed_node("tenant-a", (2, n), change).await;
    };
    let (explicit, forced) = (names::KILO_CLUSTERMESH_ENDPOINT, names::KILO_FORCE_ENDPOINT);
    create(1, &|_| {}).await;
    create(2, &|node| annotate(node, explicit, "127.0.0.1:51820")).await;
    create(3, &|node| annotate(node, forced, "[fe80::1]:51820")).await;
    create(4, &|node| annotate(node, explicit, "224.0.0.5:51820")).await;
    create(5, &|node| annotate(node, forced, "0.0.0.0:51820")).await;
    create(6, &|node| annotate(node, explicit, "10.1.7.7:51820")).await;
    create(7, &|node| annotate(node, names::KILO_WIREGUARD_IP, "100.64.2.1/24")).await;
    create(8, &|node| {
        node["spec"] = json!({"podCIDR": "10.2.1.0/24", "podCIDRs": ["10.2.1.0/24"]})
    })
    .await;
    // Node 12 has the key of a Node of mgmt, Node 13 that of a person's Peer in mgmt, and Node 14 that of Node 1. The podCIDR of
    // Node 16 contains that of Node 1.
    create(12, &|node| annotate(node, names::KILO_KEY, &key(1, 1))).await;
    create(13, &|node| annotate(node, names::KILO_KEY, &key(9, 9))).await;
    create(14, &|node| annotate(node, names::KILO_KEY, &key(2, 1))).await;
    create(15, &|node| annotate(node, names::KILO_KEY, "no key")).await;
    create(16, &|node| {
        node["spec"] = json!({"podCIDR": "10.2.0.0/20", "podCIDRs": ["10.2.0.0/20"]})
    })
    .await;
    // Node 17 claims the address of a Node of mgmt. It keeps a Peer, as do Nodes 9 to 11.
    create(17, &|node| {
        node["status"]["addresses"][0]["address"] = json!("198.51.1.1")
    })
    .await;
    // Node 9 has the address of Node 1.
    create(9, &|node| {
        annotate(node, names::KILO_ENDPOINT, "198.51.2.1:51820");
        node["status"]["addresses"][0]["address"] = json!("198.51.2.1");
    })
    .await;
    // Node 10 claims a part of the podCIDR of Node 1, and a network of mgmt.
    create(10, &|node| {
        annotate(node, names::KILO_ALLOWED_LOCATION_IPS, "10.2.1.128/25,10.1.0.0/24")
    })
    .await;
    create(11, &|node| {
        annotate(node, names::KILO_ENDPOINT, "169.254.7.7:51820");
        node["status"]["addresses"] = json!([{"type": "ExternalIP", "address": "169.254.7.7"}]);
    })
    .await;
}

/// Creates the Peer of a person, which belongs to no mesh.
async fn create_laptop(env: &TestEnv) -> Peer {
    let peers: Api<Peer> = Api::all(env.client("mgmt").await);
    let laptop: Peer = serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
        "spec": {"publicKey": key(9, 9), "allowedIPs": ["192.0.2.7/32"]},
    }))
    .unwrap();
    peers.create(&PostParams::default(), &laptop).await.unwrap()
}

/// Messages of the condition Degraded about a shared endpoint, and about prefixes that are left out of a Peer. The condition shows
/// at most five problems: here the message about the skipped Nodes and these four.
const LEFT_OUT: [&str; 4] = [
    "cluster \"tenant-a\": Nodes tenant-a-1 and tenant-a-9 both have the endpoint 198.51.2.1:51820, where at most one of them answers",
    "cluster \"tenant-a\": 198.51.2.1/32 of Node tenant-a-9 also belongs to Node tenant-a-1, which keeps it",
    "cluster \"tenant-a\": 10.2.1.128/25 of Node tenant-a-10 lies in 10.2.1.0/24 of Node tenant-a-1, which keeps it",
    "cluster \"tenant-a\": 10.1.0.0/24 of annotation allowed-location-ips of Node tenant-a-10 lies outside allowedNetworks of cluster \
     \"tenant-a\" (10.2.0.0/16, 100.64.2.0/24, 198.51.2.0/24), and its Peer leaves it out. Other Nodes may have the same problem",
];
/// As [`LEFT_OUT`]. It is the sixth problem, so it is shown when another one is solved.
const SIXTH: &str = "cluster \"tenant-a\": annotation endpoint 169.254.7.7 of Node tenant-a-11 is no endpoint of its Peer: it is a link-local \
                     address. Other Nodes may have the same problem";

// threat: forbidden-endpoint, foreign-network, malformed-node, duplicate-key-or-range
#[tokio::test]
async fn node_with_invalid_claim_is_left_out_alone_with_a_reason() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    create_nodes(&env).await;
    let laptop = create_laptop(&env).await;
    let _controller = env.start_controller().await;
    env.apply_mesh(&env.mesh()).await;

    let names: Vec<String> = [1, 10, 11, 17, 9]
        .map(|n| format!("prod--tenant-a--tenant-a-{n}"))
        .into();
    let names: Vec<&str> = ["laptop"].into_iter().chain(names.iter().map(|name| &**name)).collect();
    let mut peers = env.until_peers("mgmt", &names, SOON).await;
    assert_eq!(peers.remove("laptop"), Some(laptop));
    let claims: BTreeMap<&str, Value> = peers
        .iter()
        .map(|(name, peer)| {
            let spec = serde_json::to_value(&peer.spec).unwrap();
            let endpoint = &spec["endpoint"]["dnsOrIP"]["ip"];
            (
                name.strip_prefix("prod--tenant-a--").unwrap(),
                json!([spec["allowedIPs"], endpoint]),
            )
        })
        .collect();
    assert_eq!(
        json!(claims),
        json!({
            "tenant-a-1": [["10.2.1.0/24", "100.64.2.1/32", "198.51.2.1/32"], "198.51.2.1"],
            "tenant-a-9": [["10.2.9.0/24", "100.64.2.9/32"], "198.51.2.1"],
            "tenant-a-10": [["10.2.10.0/24", "100.64.2.10/32", "198.51.2.10/32"], "198.51.2.10"],
            "tenant-a-11": [["10.2.11.0/24", "100.64.2.11/32"], null],
            "tenant-a-17": [["10.2.17.0/24", "100.64.2.17/32"], "198.51.2.17"],
        })
    );

    status_gives_each_reason(&env).await;
    let mut flags = operator::flags(&env, &["mgmt", "tenant-a"]);
    flags.push("--member-context=tenant-a=tenant-a".to_owned());
    plan_gives_each_reason(&flags).await;
    explain_gives_reason_of_each_node(&flags).await;

    // Without these two Nodes, few enough problems are left that the sixth is shown.
    for node in ["tenant-a-9", "tenant-a-17"] {
        env.remove_node("tenant-a", node).await;
    }
    wait_until("the sixth problem in the status", SOON, async || {
        match env.condition("Degraded").await {
            Some((_, message)) if message.contains(SIXTH) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
    .unwrap();
}

/// The status lists the skipped Nodes, and an Event exists for each.
async fn status_gives_each_reason(env: &TestEnv) {
    let message = env.until_condition("Degraded", "True/NodesSkipped", SOON).await;
    let (n, reason, first) = SKIPPED[0];
    let skipped = format!("12 node(s) of cluster \"tenant-a\" have no Peer, first tenant-a-{n}: {reason} ({first})");
    assert!(message.starts_with(&skipped), "{message}");
    for left_out in LEFT_OUT {
        assert!(message.contains(left_out), "{left_out}: {message}");
    }
    let status = env.get_mesh().await.unwrap().status.unwrap();
    let row = &status.clusters[1];
    assert_eq!((row.registered_peers, row.skipped_nodes), (5, 12));
    let listed: Vec<(String, &str, &str)> = row
        .skipped
        .iter()
        .map(|one| (one.node.clone(), &*one.reason, &*one.message))
        .collect();
    assert_eq!(
        listed,
        SKIPPED.map(|(n, reason, message)| (format!("tenant-a-{n}"), reason, message))
    );
    wait_until("an Event for each skipped Node", SOON, async || {
        let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
        let is_reported = |(n, reason, message): &(u8, &str, &str)| {
            let node = format!("tenant-a-{n}");
            let mut lines = events.lines().filter(|line| line.starts_with(reason));
            lines.any(|line| line.contains(&node) && line.contains(message))
        };
        if SKIPPED.iter().all(is_reported) {
            Ok(())
        } else {
            Err(events)
        }
    })
    .await
    .unwrap();
}

async fn plan_gives_each_reason(flags: &[String]) {
    let (code, out, err) = clustermeshctl(&["plan", "--output=json"], flags).await;
    assert_eq!(code, "0", "{out}{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let mesh = &report["meshes"][0];
    let skipped: Vec<Value> = SKIPPED
        .iter()
        .map(|(n, reason, message)| json!({"node": format!("tenant-a-{n}"), "reason": reason, "message": message}))
        .collect();
    assert_eq!(mesh["clusters"][1]["skipped"], json!(skipped));
    let (code, out, err) = clustermeshctl(&["plan"], flags).await;
    assert_eq!(code, "0", "{out}{err}");
    let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
    for (n, reason, message) in SKIPPED {
        let line = format!("! Node tenant-a-{n} {reason}: {message}");
        assert!(text.contains(&line), "{line}: {out}");
    }
    for message in LEFT_OUT {
        assert!(text.contains(message), "{message}: {out}");
    }
}

async fn explain_gives_reason_of_each_node(flags: &[String]) {
    for (n, reason, message) in SKIPPED {
        let to = format!("tenant-a/tenant-a-{n}");
        let (code, out, err) = clustermeshctl(&["explain", "mgmt/mgmt-1", &to, "--output=json"], flags).await;
        assert_eq!(code, "1", "{out}{err}");
        let why = format!("Node tenant-a-{n} of cluster \"tenant-a\" has no Peer: {reason} ({message})");
        assert!(out.contains(&json!(why).to_string()), "{out}");
        let node = format!("tenant-a/tenant-a-{n}");
        let (code, out, err) = clustermeshctl(&["explain", "node", &node, "--output=json"], flags).await;
        assert_eq!(code, "1", "{out}{err}");
        let answer: Value = serde_json::from_str(&out).unwrap();
        let left_out = &answer["meshes"][0]["leftOut"][0];
        assert_eq!(
            (&left_out["reason"], &left_out["message"]),
            (&json!(reason), &json!(message))
        );
    }
    // Node 9 has a Peer, but its InternalIP is an address of Node 1.
    let (code, out, err) = clustermeshctl(
        &["explain", "mgmt/mgmt-1", "tenant-a/tenant-a-9", "--output=json"],
        flags,
    )
    .await;
    assert_eq!(code, "0", "{out}{err}");
    let note = "198.51.2.1 belongs to Node tenant-a-1, so the connection reaches that Node and not tenant-a-9";
    assert!(out.contains(note), "{out}");
}
