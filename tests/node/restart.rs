//! Tests real agents across restarts and key rotations: they restore the cached state, never print the private key, and initiate
//! handshakes at once during a rotation.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use clustermesh_api::names::KILO_KEY;
use clustermesh_lab::{Running, wait_until};
use clustermesh_tests::sessions::check_handshake_kept;
use kube::{
    api::PostParams,
    config::{AuthInfo, Kubeconfig},
};
use nix::sys::signal::Signal;

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters, peer};

/// The path of a file in the directory of the agent's key.
fn state_file(clusters: &TwoClusters, site: &Site, name: &str) -> PathBuf {
    clusters.key_file(site).with_file_name(name)
}

/// A column of `wg show INTERFACE WHAT`, by public key.
async fn wg_show(clusters: &TwoClusters, site: &Site, what: &str) -> BTreeMap<String, String> {
    let words = ["wg", "show", &site.interface, what];
    let output = clusters.host(site).exec(words).await.expect("wg show").stdout;
    let lines = output.lines().filter_map(|line| line.split_once('\t'));
    lines.map(|(key, rest)| (key.to_owned(), rest.to_owned())).collect()
}

async fn kill(agent: &mut Running) {
    agent.signal(Signal::SIGKILL).expect("kill");
    agent.wait_for_exit(TIMEOUT).await.expect("the agent exits");
}

async fn wait_for_page(clusters: &TwoClusters, site: &Site, path: &str, want: &str) {
    wait_until(
        format!("{path} to contain {want:?}"),
        TIMEOUT,
        async || match clusters.try_page(site, path).await? {
            (_, text) if text.contains(want) => Ok(()),
            (code, text) => Err(format!("{code}: {text}")),
        },
    )
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

async fn wait_for_cache(file: &Path, want: &str) {
    wait_until(
        format!("{} to contain {want}", file.display()),
        TIMEOUT,
        async || match fs::read_to_string(file) {
            Ok(text) if text.contains(want) => Ok(()),
            other => Err(format!("{other:?}")),
        },
    )
    .await
    .unwrap_or_else(|error| panic!("{error}"));
}

#[tokio::test]
async fn cached_state_is_restored_unless_old_or_damaged() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let _first = clusters.agent(mgmt, "agent-mgmt");
    let mut second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(tenant, mgmt).await;

    // Besides the real Peer, the agent caches the Peer `gone`, which is deleted later, while the agent does not run.
    let real = peer(mgmt, &clusters.wait_for_published(mgmt).await);
    let copy = |name: &str, n: u8| {
        let mut peer = real.clone();
        peer.metadata.name = Some(name.into());
        peer.spec.public_key = clustermesh_core::key::PublicKey::new([n; 32]).to_string();
        peer.spec.allowed_ips = vec![format!("10.10.{n}.0/24")];
        peer
    };
    let gone = copy("gone", 41);
    let peers = clusters.peers(tenant).await;
    peers
        .create(&PostParams::default(), &gone)
        .await
        .expect("create a Peer");
    let cache = state_file(&clusters, tenant, "wg-agent.cache");
    wait_for_cache(&cache, &gone.spec.public_key).await;
    let text = fs::read_to_string(&cache).expect("the cache");
    assert!(text.contains(&real.spec.public_key), "{text}");
    let mode = |path: &Path| fs::metadata(path).expect("the file's metadata").permissions().mode() & 0o7777;
    assert_eq!(
        (mode(&cache), mode(cache.parent().expect("a directory"))),
        (0o600, 0o700)
    );

    // Deletes a Peer between two runs of the agent, and starts the second run without the API server.
    kill(&mut second).await;
    clusters.delete_peer(tenant, "gone").await;
    clusters
        .lab
        .cluster(tenant.cluster)
        .kill_api()
        .expect("kill the API server");
    let mut second = clusters.agent(tenant, "agent-tenant-2");
    clusters.wait_until_reaches(tenant, mgmt).await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    wait_for_page(
        &clusters,
        tenant,
        "/readyz",
        "ok\nbut: cache: the API server has not listed these kinds since",
    )
    .await;
    // All four kinds come from the cache: Peers, PeerPolicies, Nodes and EndpointSlices.
    wait_for_page(&clusters, tenant, "/metrics", "\nwg_agent_remembered_kinds 4\n").await;
    let on_device = wg_show(&clusters, tenant, "allowed-ips").await;
    let expected = [&real, &gone].map(|peer| peer.spec.public_key.clone());
    assert_eq!(
        on_device.keys().cloned().collect::<Vec<_>>(),
        sorted(expected),
        "the cached peers are on the device"
    );
    let before = wg_show(&clusters, tenant, "latest-handshakes").await;

    // After the API server has returned, the deleted Peer is removed, and the other Peer keeps its session.
    clusters
        .lab
        .cluster(tenant.cluster)
        .start_api()
        .await
        .expect("start the API server");
    wait_for_page(&clusters, tenant, "/metrics", "\nwg_agent_remembered_kinds 0\n").await;
    wait_until("the deleted Peer to leave the device", TIMEOUT, async || {
        let now = wg_show(&clusters, tenant, "latest-handshakes").await;
        let keys: Vec<&String> = now.keys().collect();
        if keys == [&real.spec.public_key] {
            Ok(())
        } else {
            Err(format!("{keys:?}"))
        }
    })
    .await
    .expect("the peer is removed");
    let after = wg_show(&clusters, tenant, "latest-handshakes").await;
    let [then, now] = [&before, &after].map(|all| all[&real.spec.public_key].parse().expect("seconds"));
    check_handshake_kept("the node of mgmt", then, now);
    clusters.assert_pings(tenant, mgmt).await;
    clusters.wait_until_nothing_is_reported(tenant).await;

    // If the API server answers every list with an error, the tunnels are kept, but the agent is not ready.
    kill(&mut second).await;
    let kubeconfig = clusters.kubeconfig(tenant);
    let good = fs::read_to_string(&kubeconfig).expect("the kubeconfig");
    let mut invalid = Kubeconfig::from_yaml(&good).expect("a kubeconfig");
    for user in &mut invalid.auth_infos {
        user.auth_info = Some(AuthInfo {
            token: Some("invalid".to_owned().into()),
            ..AuthInfo::default()
        });
    }
    fs::write(&kubeconfig, serde_json::to_string(&invalid).expect("JSON")).expect("write the kubeconfig");
    let mut second = clusters.agent(tenant, "agent-tenant-refused");
    clusters.wait_until_reaches(tenant, mgmt).await;
    wait_for_page(
        &clusters,
        tenant,
        "/readyz",
        "cache: the API server answers but refuses to list: Peer (",
    )
    .await;
    let (code, page) = clusters.page(tenant, "/readyz").await;
    assert!(code == 503 && page.contains("Unauthorized"), "{code}: {page}");
    fs::write(&kubeconfig, good).expect("restore the kubeconfig");

    // A cache older than `--cache-max-age` is reported and not used: the agent waits for the API server.
    kill(&mut second).await;
    clusters
        .lab
        .cluster(tenant.cluster)
        .kill_api()
        .expect("kill the API server");
    let saved = fs::read(&cache).expect("the cache");
    let mut second = clusters.agent_with_env_and_args(tenant, "agent-tenant-old", &[], &["--cache-max-age=0s"]);
    wait_for_page(
        &clusters,
        tenant,
        "/readyz",
        "which is longer ago than --cache-max-age (0s)",
    )
    .await;
    wait_for_page(&clusters, tenant, "/readyz", "waiting for the first list of").await;
    // The agent has renamed the old cache. The next step needs a file that it can damage.
    fs::write(&cache, saved).expect("restore the cache");
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o600)).expect("set the mode");
    clusters
        .lab
        .cluster(tenant.cluster)
        .start_api()
        .await
        .expect("start the API server");

    // A damaged cache is renamed and not used: the agent waits for the API server.
    kill(&mut second).await;
    let text = fs::read_to_string(&cache).expect("the cache");
    fs::write(&cache, &text[..text.len() - 9]).expect("damage the cache");
    clusters
        .lab
        .cluster(tenant.cluster)
        .kill_api()
        .expect("kill the API server");
    let second = clusters.agent(tenant, "agent-tenant-3");
    wait_for_page(&clusters, tenant, "/readyz", "waiting for the first list of").await;
    let aside = state_file(&clusters, tenant, "wg-agent.cache.damaged");
    assert_eq!(fs::read(&aside).expect("set aside"), text.as_bytes()[..text.len() - 9]);
    clusters
        .lab
        .cluster(tenant.cluster)
        .start_api()
        .await
        .expect("start the API server");
    clusters.wait_until_reaches(tenant, mgmt).await;
    wait_for_page(
        &clusters,
        tenant,
        "/readyz",
        &format!("but: cache: the cache {} is not used", cache.display()),
    )
    .await;
    let log = second.log();
    assert!(log.contains(&format!("set aside as {}", aside.display())), "{log}");
}

fn sorted<const N: usize>(mut all: [String; N]) -> Vec<String> {
    all.sort();
    all.into()
}

#[tokio::test]
async fn peer_without_endpoint_is_contacted_after_a_restart() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let mut first = clusters.agent(mgmt, "agent-mgmt");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(tenant, mgmt).await;
    let peers = clusters.peers(mgmt).await;
    let mut passive = peers.get("mesh--tenant-a--tenant-a-1").await.expect("the Peer");
    passive.spec.endpoint = None;
    peers
        .replace("mesh--tenant-a--tenant-a-1", &PostParams::default(), &passive)
        .await
        .expect("replace the Peer");
    // The cached Peer has no endpoint any more. But the cache contains the endpoint from which the peer last sent. After the restart, the
    // agent knows no other endpoint to which it can send a handshake initiation and then the test's ping.
    wait_for_cache(&state_file(&clusters, mgmt, "wg-agent.cache"), "\"endpoint\":null").await;
    assert!(
        first.terminate(TIMEOUT).await.expect("the agent exits").success(),
        "{}",
        first.log()
    );
    let _first = clusters.agent(mgmt, "agent-mgmt-2");
    clusters.wait_until_reaches(mgmt, tenant).await;
}

/// The first halves of the encodings in which a log might contain a 32-byte secret.
fn encodings(key: &str) -> Vec<String> {
    use base64::{Engine, engine::general_purpose as alphabets};
    let bytes = alphabets::STANDARD.decode(key.trim()).expect("base64");
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let list = format!("{bytes:?}");
    // Half a key is as confidential as the whole key, and a log line may be truncated.
    let half = |text: &str| text[..text.len() / 2].to_owned();
    vec![
        half(&alphabets::STANDARD.encode(&bytes)),
        half(&alphabets::URL_SAFE_NO_PAD.encode(&bytes)),
        half(&hex),
        half(&hex.to_uppercase()),
        half(&list),
    ]
}

// threat: key-in-output
#[tokio::test]
async fn agent_output_never_contains_the_private_key() {
    let clusters = TwoClusters::start().await;
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    // The first start creates the key, the second reads it.
    let mut first = clusters.agent_with_env(mgmt, "agent-mgmt", &["RUST_LOG=trace"]);
    clusters.wait_for_published(mgmt).await;
    assert!(first.terminate(TIMEOUT).await.expect("the agent exits").success());
    let mut agent = clusters.agent_with_env(mgmt, "agent-mgmt-2", &["RUST_LOG=trace"]);
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    clusters.wait_until_ready(mgmt).await;
    let cache = state_file(&clusters, mgmt, "wg-agent.cache");
    let public = clusters.annotations(mgmt).await[KILO_KEY].clone();
    let other = clusters.annotations(tenant).await[KILO_KEY].clone();
    wait_for_cache(&cache, &other).await;

    let mut outputs: BTreeMap<String, String> = BTreeMap::new();
    for path in ["/metrics", "/debug/state", "/readyz", "/healthz"] {
        outputs.insert(path.into(), clusters.page(mgmt, path).await.1);
    }
    outputs.insert("annotations".into(), format!("{:?}", clusters.annotations(mgmt).await));
    // The control socket must not return the private key, because `wg show dump` would print it.
    let dump = ["wg", "show", &mgmt.interface, "dump"];
    outputs.insert(
        "wg show dump".into(),
        clusters.host(mgmt).exec(dump).await.expect("wg show").stdout,
    );
    let pid = agent.pid().expect("the agent runs");
    for file in ["cmdline", "environ", "comm"] {
        let text = fs::read(format!("/proc/{pid}/{file}")).expect("read a file of the agent's process");
        outputs.insert(file.into(), String::from_utf8_lossy(&text).into_owned());
    }
    assert!(agent.terminate(TIMEOUT).await.expect("the agent exits").success());
    outputs.insert("log of the first start".into(), first.log());
    outputs.insert("log".into(), agent.log());
    outputs.insert("cache".into(), fs::read_to_string(&cache).expect("the cache"));
    // The error about an invalid key file must not quote its content.
    let file = clusters.key_file(mgmt);
    let private = fs::read_to_string(&file).expect("the key");
    fs::write(&file, format!("{private}{private}")).expect("write an invalid key");
    let mut refused = clusters.agent(mgmt, "agent-refused");
    assert!(!refused.wait_for_exit(TIMEOUT).await.expect("the agent exits").success());
    outputs.insert("refusal".into(), refused.log());

    // These outputs contain an expected text: otherwise the search for the private key in them would prove nothing.
    for (what, expected) in [
        ("log of the first start", "created a private key for this node"),
        ("log", "TRACE"),
        ("log", public.as_str()),
        ("/metrics", "wg_agent_peers"),
        ("/debug/state", &public),
        ("annotations", &public),
        ("wg show dump", &other),
        ("cache", &other),
        ("refusal", "does not contain a WireGuard private key"),
        ("cmdline", "--key-file"),
    ] {
        assert!(
            outputs[what].contains(expected),
            "{what} does not contain {expected}: {}",
            outputs[what]
        );
    }
    for (what, text) in &outputs {
        for secret in encodings(&private) {
            assert!(!text.contains(&secret), "{what} contains the private key");
        }
    }
}

#[tokio::test]
async fn key_rotation_over_ipv4_waits_for_no_repeated_handshake() {
    rotate_key(&TwoClusters::start().await, "172.30.").await;
}

#[tokio::test]
async fn key_rotation_over_ipv6_waits_for_no_repeated_handshake() {
    let clusters = TwoClusters::start().await;
    clusters.use_ipv6_underlay().await;
    rotate_key(&clusters, "[fd77::").await;
}

/// Rotates a node's key during traffic, and checks that this node initiates the handshake with its new key. Otherwise the traffic
/// would stop until the other node repeats its initiation, after 5 s. `outer` is the start of both endpoint addresses.
async fn rotate_key(clusters: &TwoClusters, outer: &str) {
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));
    let agent = clusters.agent(mgmt, "agent-mgmt");
    let _second = clusters.agent(tenant, "agent-tenant");
    clusters.write_all_peers().await;
    clusters.wait_until_reaches(tenant, mgmt).await;
    clusters.wait_until_ready(mgmt).await;
    let old = clusters.annotations(mgmt).await[KILO_KEY].clone();
    let before = nft_tables(clusters, mgmt).await;
    let private = fs::read_to_string(clusters.key_file(mgmt)).expect("the key");

    let rotate = || clusters.command(mgmt, &["rotate-key"]);
    let stderr = clusters.host(mgmt).exec(rotate()).await.expect("rotate-key").stderr;
    let next = wait_until("another key on the Node", TIMEOUT, async || {
        let now = clusters.annotations(mgmt).await[KILO_KEY].clone();
        if now == old { Err(now) } else { Ok(now) }
    })
    .await
    .expect("the new key is published");
    assert!(stderr.contains(&next), "{stderr}");
    let again = clusters.host(mgmt).try_exec(rotate()).await.expect("run");
    assert!(
        !again.status.success() && again.stderr.contains("a rotation to this key is under way"),
        "{}",
        again.stderr
    );

    // Until the peer has the new key, the node uses the old key and reports that the new one is published.
    wait_for_page(
        clusters,
        mgmt,
        "/readyz",
        &format!("\nbut: key: the agent publishes the new key {next} and still uses the old one;"),
    )
    .await;
    for _ in 0..5 {
        clusters.assert_pings(mgmt, tenant).await;
        clusters.assert_pings(tenant, mgmt).await;
    }

    // The peer gets the new key while it sends packets. The node with the new key sends only replies, because any other packet would make
    // its device initiate a handshake.
    let words = ["ping", "-n", "-i", "0.05", "-I", tenant.pod, mgmt.pod];
    let mut flow = clusters.host(tenant).spawn("flow", words).expect("ping");
    flow.wait_for_log("icmp_seq=10 ", TIMEOUT).await.expect("ten replies");
    let capture = clusters.lab.capture("rotation", "udp port 51820").await;
    let capture = capture.expect("start a capture");
    let peers = clusters.peers(tenant).await;
    let mut updated = peers.get("mesh--mgmt--mgmt-1").await.expect("the Peer");
    updated.spec.public_key.clone_from(&next);
    peers
        .replace("mesh--mgmt--mgmt-1", &PostParams::default(), &updated)
        .await
        .expect("replace the Peer");
    wait_until("a handshake with the new key", TIMEOUT, async || {
        let handshakes = wg_show(clusters, tenant, "latest-handshakes").await;
        if handshakes.keys().eq([&next]) && handshakes[&next] != "0" {
            Ok(())
        } else {
            Err(format!("{handshakes:?}\n{}", agent.log()))
        }
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));
    // An ICMP error has the number of its packet too, but is no reply.
    let replies = || flow.log().matches("bytes from").count();
    let before_recovery = replies();
    wait_until("20 more replies", TIMEOUT, async || match replies() {
        count if count >= before_recovery + 20 => Ok(()),
        count => Err(format!("{count} replies, was {before_recovery}")),
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", agent.log()));
    clusters.assert_pings(mgmt, tenant).await;
    let why = "this node has a new key: a peer initiated a handshake with it";
    assert!(agent.log().contains(why), "{}", agent.log());
    // The senders of the initiations, which have 148 bytes. The peer's initiation comes first: it makes the node use the new key.
    let captured = capture.stop().await.expect("the capture ends");
    let packets = captured.packets("").await.expect("read the capture");
    let initiations = packets.iter().filter(|line| line.ends_with("UDP, length 148"));
    let senders: Vec<&str> = initiations.filter_map(|line| line.split(' ').nth(2)).collect();
    let ours = wg_show(clusters, tenant, "endpoints").await[&next]
        .replace(['[', ']'], "")
        .replace(":51820", ".51820");
    let theirs = senders.iter().position(|sender| *sender != ours);
    assert!(
        theirs.is_some_and(|first| senders[first..].contains(&&*ours)),
        "{ours} is not in {senders:?}: {packets:?}"
    );
    for site in [mgmt, tenant] {
        let endpoints = wg_show(clusters, site, "endpoints").await;
        assert!(endpoints.values().all(|at| at.starts_with(outer)), "{endpoints:?}");
    }
    let now = fs::read_to_string(clusters.key_file(mgmt)).expect("the key");
    let mode = fs::metadata(clusters.key_file(mgmt))
        .expect("the key")
        .permissions()
        .mode()
        & 0o7777;
    assert!(now != private && mode == 0o600, "{mode:o}");
    assert!(!state_file(clusters, mgmt, "key.next").exists());
    clusters.wait_until_nothing_is_reported(mgmt).await;
    assert_eq!(
        nft_tables(clusters, mgmt).await,
        before,
        "the nftables table of the key rotation is removed"
    );
    for secret in encodings(&private).into_iter().chain(encodings(&now)) {
        assert!(!agent.log().contains(&secret) && !stderr.contains(&secret));
    }
}

/// The nftables tables of a node.
async fn nft_tables(clusters: &TwoClusters, site: &Site) -> String {
    clusters
        .host(site)
        .exec(["nft", "list", "tables"])
        .await
        .expect("nft")
        .stdout
}
