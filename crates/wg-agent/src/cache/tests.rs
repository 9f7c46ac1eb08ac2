use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use clustermesh_core::{
    mesh::Protocol,
    observe::{Endpoint, PeerRole, PeerSpec, PolicySpec},
};

use super::{format::VERSION, *};
use crate::source::{objects::OwnNode, watch::WatchedKind};

const NOW: UnixTime = UnixTime(1_700_000_000);

fn peer(endpoint: Endpoint) -> ParsedPeer {
    ParsedPeer {
        cluster: "mgmt".into(),
        mesh: ("ns".into(), "prod".into()),
        revision: 41,
        spec: Ok(PeerSpec {
            public_key: PublicKey::new([7; 32]),
            allowed_ips: ["10.5.0.0/24".parse().unwrap(), "fd00:5::/64".parse().unwrap()].into(),
            endpoint: Some(endpoint),
            candidates: vec!["192.0.2.1:51820".parse().unwrap(), "[2001:db8::1]:1".parse().unwrap()],
            persistent_keepalive: 25,
            role: PeerRole::OwnNode("west".into()),
        }),
    }
}

fn snapshot() -> ClusterSnapshot {
    let policy = ParsedPolicy {
        spec: PolicySpec {
            sources: ["10.5.0.0/24".parse().unwrap()].into(),
            networks: ["10.5.0.0/16".parse().unwrap()].into(),
            allow: ["10.6.0.0/16".parse().unwrap()].into(),
            deny: ["10.6.0.9:6443".parse().unwrap()].into(),
            infrastructure_ports: [(Protocol::Sctp, 10250)].into(),
            anchored: ["10.7.0.0/16".parse().unwrap()].into(),
            closed: true,
        },
        problem: Some("of some kind".into()),
        digest: [1, 2, 3, 4, 5, 6, 7, 8],
    };
    let node = ParsedNode {
        created: 1_700_000_000,
        wireguard_ip: Some("100.66.0.7".parse().unwrap()),
        internal_ips: vec!["192.0.2.7".parse().unwrap()],
        pod_cidrs: ["10.20.1.0/24".parse().unwrap()].into(),
        own: Some(OwnNode {
            external_ips: vec!["2001:db8::7".parse().unwrap()],
            force_endpoint: Some(Endpoint::Dns("n.example.org".into(), 7)),
            location: "east".into(),
            kg_seen: Some(5),
            published: [("kilo.squat.ai/key", Some("x".to_owned()))].into(),
        }),
    };
    let unreadable = ParsedPeer {
        spec: Err("nonsense".into()),
        ..peer(Endpoint::Ip("192.0.2.1:1".parse().unwrap()))
    };
    let peers = [
        ("address", peer(Endpoint::Ip("192.0.2.1:51820".parse().unwrap()))),
        ("name", peer(Endpoint::Dns("a.example.org".into(), 51820))),
        ("unreadable", unreadable),
    ];
    ClusterSnapshot {
        peers: WatchedKind::Listed(peers.map(|(name, peer)| (name.to_owned(), peer)).into()),
        policies: WatchedKind::Listed([("mesh--mgmt".to_owned(), policy)].into()),
        nodes: WatchedKind::Listed([("n".to_owned(), node)].into()),
        api_servers: WatchedKind::Listed(
            [("kubernetes".to_owned(), ["192.0.2.9:6443".parse().unwrap()].into())].into(),
        ),
        addresses: [("a.example.org".to_owned(), "192.0.2.3".parse().unwrap())].into(),
        ..ClusterSnapshot::default()
    }
}

fn content() -> CacheContent {
    CacheContent {
        saved: Some(Arc::new(SavedObjects::of(&snapshot()))),
        confirmed: NOW,
        live: [(PublicKey::new([7; 32]), "203.0.113.5:4000".parse().unwrap())].into(),
    }
}

fn file(directory: &Path) -> CacheFile {
    CacheFile {
        path: directory.join("cache"),
        node: "n".into(),
        max_age: Duration::from_secs(100),
    }
}

fn names(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = files.map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn written_cache_is_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    let found = load(&file, NOW);
    let saved = SavedObjects::of(&snapshot());
    assert_eq!(
        found,
        LoadedCache {
            saved: Some(saved.clone()),
            confirmed: NOW,
            live: content().live,
            problem: None
        }
    );
    // Not saved: the unreadable Peer, and two fields of the own Node: when kg last checked in, and the published annotations.
    assert_eq!(saved.peers.keys().collect::<Vec<_>>(), ["address", "name"]);
    assert_eq!(
        saved.nodes["n"].own,
        Some(OwnNode {
            external_ips: vec!["2001:db8::7".parse().unwrap()],
            force_endpoint: Some(Endpoint::Dns("n.example.org".into(), 7)),
            location: "east".into(),
            ..OwnNode::default()
        })
    );
    assert_eq!(fs::metadata(&file.path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(names(directory.path()), ["cache"]);
}

/// A change of the format needs a new version number, by which an agent recognizes a file that it cannot read.
#[test]
fn golden_file_of_this_version_is_written_and_read() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/cache/golden/version-{VERSION}.cache"));
    if std::env::var_os("WRITE_GOLDEN_CACHE").is_some() && !golden.exists() {
        fs::copy(&file.path, &golden).unwrap();
    }
    let written = fs::read_to_string(&file.path).unwrap();
    assert!(
        fs::read_to_string(&golden).is_ok_and(|golden| golden == written),
        "the cache differs from {}: a type in SavedObjects has changed. Raise VERSION in cache/format.rs, delete this file, and \
         write the one of the new version: WRITE_GOLDEN_CACHE=1 cargo test -p wg-agent golden\n{written}",
        golden.display()
    );
    fs::write(&file.path, fs::read(&golden).unwrap()).unwrap();
    let want = LoadedCache {
        saved: Some(SavedObjects::of(&snapshot())),
        confirmed: NOW,
        live: content().live,
        problem: None,
    };
    assert_eq!(load(&file, NOW), want);
}

#[test]
fn missing_cache_is_no_problem_but_unreadable_one_is() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(load(&file(directory.path()), NOW), LoadedCache::default());
    let file = CacheFile {
        path: directory.path().join("x").join("cache"),
        node: "n".into(),
        max_age: Duration::from_secs(100),
    };
    fs::write(directory.path().join("x"), "a file where a directory should be").unwrap();
    let problem = load(&file, NOW).problem.unwrap();
    assert!(problem.starts_with("cannot read the cache"), "{problem}");
}

// threat: forged-cache
#[test]
fn unusable_cache_is_renamed() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    let whole = format::write("n", &content()).unwrap();
    let other = format::write("m", &content()).unwrap();
    let other_version = VERSION + 1;
    let cases: [(&str, &str, &str); 8] = [
        ("empty", "", "it is damaged (it is cut off)"),
        (
            "cut off",
            &whole[..whole.len() / 2],
            "it is damaged (its checksum does not match)",
        ),
        (
            "one digit changed",
            &whole.replacen("10.5.0.0/24", "10.5.0.0/23", 1),
            "its checksum does not match",
        ),
        ("without header fields", "{}\n{}\n", "it is damaged (missing field"),
        (
            "written by another program",
            "{\"format\": \"x\", \"version\": 1}\n",
            "it is not a cache of wg-agent",
        ),
        (
            "written by another version",
            &format!("{{\"format\":\"clustermesh wg-agent cache\",\"version\":{other_version},\"new\":1}}\n?\n"),
            &format!(
                "another version of wg-agent wrote it: it has format version {other_version}, and this agent reads version {VERSION}"
            ),
        ),
        ("written for another node", &other, "it was written for node \"m\""),
        (
            "with more fields",
            &with_unknown_field(&whole),
            "unknown field `unknown`",
        ),
    ];
    for (what, text, why) in cases {
        fs::write(&file.path, text).unwrap();
        fs::set_permissions(&file.path, fs::Permissions::from_mode(0o600)).unwrap();
        let found = load(&file, NOW);
        let problem = found.problem.clone().unwrap_or_default();
        assert!(
            problem.contains(why) && problem.contains("set aside as"),
            "{what}: {problem}"
        );
        assert_eq!((found.saved, found.live), (None, LiveEndpoints::new()), "{what}");
        assert_eq!(names(directory.path()), ["cache.damaged"], "{what}");
        assert_eq!(
            fs::read_to_string(directory.path().join("cache.damaged")).unwrap(),
            text,
            "{what}"
        );
    }
}

/// A file with an unknown field and a correct checksum.
fn with_unknown_field(whole: &str) -> String {
    let (head, body) = whole.trim_end().split_once('\n').unwrap();
    let changed = body.replacen("\"cluster\":", "\"unknown\":1,\"cluster\":", 1);
    let hash = |text: &str| -> String {
        use sha2::Digest;
        sha2::Sha256::digest(text.as_bytes())
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    };
    format!("{}\n{changed}\n", head.replacen(&hash(body), &hash(&changed), 1))
}

// threat: forged-cache
#[test]
fn cache_open_to_others_or_behind_a_symlink_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    fs::set_permissions(&file.path, fs::Permissions::from_mode(0o640)).unwrap();
    let problem = load(&file, NOW).problem.unwrap();
    assert!(
        problem.contains("others could read or change it (mode 0640"),
        "{problem}"
    );

    fs::rename(
        directory.path().join("cache.damaged"),
        directory.path().join("elsewhere"),
    )
    .unwrap();
    symlink(directory.path().join("elsewhere"), &file.path).unwrap();
    let problem = load(&file, NOW).problem.unwrap();
    assert!(problem.contains("it is a symbolic link"), "{problem}");
}

/// `file::write` alone leaves the old file. After a failed write, the writer task deletes the old file (next test).
#[test]
fn failed_cache_write_leaves_the_old_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    let before = fs::read(&file.path).unwrap();
    // A directory with this name blocks the new file.
    fs::create_dir(directory.path().join("cache.new")).unwrap();
    let error = file::write(&file, &CacheContent::default()).unwrap_err().to_string();
    assert!(error.starts_with("cannot replace the cache"), "{error}");
    assert_eq!(fs::read(&file.path).unwrap(), before);
}

/// The writer deletes the old file, because a start from it could restore access that was revoked since.
#[tokio::test]
async fn cache_after_failed_write_is_deleted_and_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    let obstacle = directory.path().join("cache.new");
    fs::create_dir(&obstacle).unwrap();
    let revoked = CacheContent {
        saved: Some(Arc::default()),
        ..content()
    };
    let (sender, receiver) = watch::channel(revoked);
    let writer = tokio::spawn(run(file.clone(), receiver, Metrics::default()));
    let wait_until_exists = async |exists: bool| {
        let wait = async {
            while file.path.exists() != exists {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap();
    };
    wait_until_exists(false).await;
    fs::remove_dir(&obstacle).unwrap();
    // Wakes the writer without a change of the content.
    sender.send_modify(|_| {});
    wait_until_exists(true).await;
    assert_eq!(load(&file, NOW).saved, Some(SavedObjects::default()));
    drop(sender);
    writer.await.unwrap();
}

#[test]
fn cleanup_removes_all_cache_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    fs::write(directory.path().join("cache.damaged"), "").unwrap();
    fs::write(directory.path().join("key"), "").unwrap();
    let errors = remove(&file.path);
    assert_eq!(errors.len(), 0);
    assert_eq!(names(directory.path()), ["key"]);
}

#[test]
fn changed_objects_are_written_sooner_than_changed_endpoints() {
    let other_endpoints = CacheContent {
        live: LiveEndpoints::new(),
        ..content()
    };
    let other_objects = CacheContent {
        saved: Some(Arc::default()),
        ..content()
    };
    let without_objects = CacheContent {
        saved: None,
        ..content()
    };
    let milliseconds = |n| Some(Duration::from_millis(n));
    let seconds = |n| Some(Duration::from_secs(n));
    // The arguments: the content, the content that was written last, and the time since the last write.
    assert_eq!(write_delay(&content(), &CacheContent::default(), None), seconds(0));
    assert_eq!(write_delay(&content(), &content(), None), None);
    assert_eq!(
        write_delay(&without_objects, &CacheContent::default(), None),
        None,
        "the file of the last run is kept"
    );
    assert_eq!(
        write_delay(&other_objects, &content(), milliseconds(400)),
        milliseconds(600)
    );
    assert_eq!(write_delay(&other_objects, &content(), seconds(4)), seconds(0));
    assert_eq!(write_delay(&other_endpoints, &content(), seconds(4)), seconds(6));
    assert_eq!(write_delay(&other_endpoints, &content(), seconds(11)), seconds(0));
}

#[tokio::test]
async fn pending_content_is_written_before_the_writer_returns() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    let (sender, receiver) = watch::channel(content());
    sender.send_modify(|content| content.live = LiveEndpoints::new());
    drop(sender);
    run(file.clone(), receiver, Metrics::default()).await;
    let found = load(&file, NOW);
    assert_eq!(
        (found.saved, found.live),
        (Some(SavedObjects::of(&snapshot())), LiveEndpoints::new())
    );
}

#[test]
fn cache_unconfirmed_for_too_long_is_renamed() {
    let directory = tempfile::tempdir().unwrap();
    let file = file(directory.path());
    file::write(&file, &content()).unwrap();
    // The file is used at exactly the maximum age, and also after the clock was set back to 0.
    for now in [NOW.0 + 100, NOW.0, 0] {
        assert_eq!(load(&file, UnixTime(now)).problem, None, "{now}");
    }
    let found = load(&file, UnixTime(NOW.0 + 101));
    let aside = directory.path().join("cache.damaged");
    let want = format!(
        "the cache {} is not used: the API server confirmed it last at 2023-11-14T22:13:20Z, which is longer ago than \
         --cache-max-age (1m 40s): Peers that were deleted since would come back; set aside as {}",
        file.path.display(),
        aside.display()
    );
    assert_eq!(
        found,
        LoadedCache {
            problem: Some(want),
            ..LoadedCache::default()
        }
    );
    assert_eq!(names(directory.path()), ["cache.damaged"]);
}

#[test]
fn confirmation_time_lags_by_at_most_max_lag() {
    let max_lag = Duration::from_secs(60);
    let at = |seconds| UnixTime(NOW.0 + seconds);
    let saved = || SavedObjects::of(&snapshot());
    let mut cached = content();
    let mut confirm = |saved: SavedObjects, now| (cached.confirm(saved, now, max_lag), cached.confirmed);
    assert_eq!(confirm(saved(), at(59)), (false, at(0)));
    assert_eq!(confirm(saved(), at(60)), (true, at(60)));
    assert_eq!(confirm(SavedObjects::default(), at(61)), (true, at(61)));
    assert_eq!(
        confirm(SavedObjects::default(), at(5)),
        (true, at(5)),
        "a clock that was set back"
    );
    let max_lag_seconds = |max_age_hours: u64| {
        let max_age = Duration::from_secs(max_age_hours * 3600);
        CacheFile {
            max_age,
            ..file(Path::new("/"))
        }
        .max_lag()
        .as_secs()
    };
    assert_eq!([0, 1, 24, 1000].map(max_lag_seconds), [60, 150, 3600, 3600]);
}
