//! Tests hostile kubeconfigs, which are refused before anything is dialled, and changes of usable ones, which write no Peer.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use base64::{Engine, engine::general_purpose::STANDARD};
use clustermesh_lab::{NAMESPACE, Node as Machine, Running, wait_until};
use clustermesh_tests::{
    faulty::{Fault, FaultyApi},
    https_server::listen,
    test_env::{LATER, SOON, TestEnv},
};
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

/// A part of each hostile kubeconfig's token.
const SECRET: &str = "s3cr3t-t0ken";
const LISTENER: &str = "172.30.1.201:7001";

/// Counts the connections to an address of a host of the lab.
fn count_connections(host: &Machine<'_>, address: &str) -> Arc<AtomicUsize> {
    let (listener, count) = (listen(host, address.parse().unwrap()), Arc::new(AtomicUsize::new(0)));
    let counter = Arc::clone(&count);
    tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    count
}

/// Hostile kubeconfigs, by the name of their member, with a part of the message.
fn hostile_kubeconfigs(env: &TestEnv) -> Vec<(&'static str, Vec<u8>, String)> {
    let ca = STANDARD.encode("ca");
    let kubeconfig = |server: &str, cluster: Value, user: Value| {
        let mut all = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": server, "certificate-authority-data": ca}}],
            "users": [{"name": "u", "user": {"token": SECRET}}],
        });
        let merge =
            |into: &mut Value, more: Value| into.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        merge(&mut all["clusters"][0]["cluster"], cluster);
        merge(&mut all["users"][0]["user"], user);
        all.to_string().into_bytes()
    };
    let server = format!("https://{LISTENER}");
    let (none, has) = (|| json!({}), |field: &str| format!("the kubeconfig has {field}"));
    let of_user = |user| kubeconfig(&server, none(), user);
    let of_cluster = |cluster| kubeconfig(&server, cluster, none());
    let at = |server: &str| kubeconfig(server, none(), none());
    let hub = format!("https://{}:6443", env.hub().plan().api_address());
    // Each level has nine times the values of the one below: 9^9 in all.
    let bomb: String = (1..10)
        .map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(",")))
        .collect();
    let bomb = format!("a0: &a0 [{SECRET}]\n{bomb}");
    vec![
        (
            "exec",
            of_user(json!({"exec": {"apiVersion": "v1", "command": "sh"}})),
            has("users[].user.exec"),
        ),
        (
            "auth-provider",
            of_user(json!({"auth-provider": {"name": "oidc"}})),
            has("users[].user.auth-provider"),
        ),
        (
            "token-file",
            of_user(json!({"tokenFile": "/proc/self/environ"})),
            has("users[].user.tokenFile"),
        ),
        (
            "cert-file",
            of_user(json!({"client-certificate": "/etc/passwd"})),
            has("users[].user.client-certificate"),
        ),
        ("impersonation", of_user(json!({"as": "admin"})), has("users[].user.as")),
        (
            "password",
            of_user(json!({"username": "u", "password": SECRET})),
            has("users[].user.username or password"),
        ),
        (
            "insecure",
            of_cluster(json!({"insecure-skip-tls-verify": true})),
            has("clusters[].cluster.insecure-skip-tls-verify"),
        ),
        (
            "proxy",
            of_cluster(json!({"proxy-url": format!("http://{LISTENER}")})),
            has("clusters[].cluster.proxy-url"),
        ),
        (
            "ca-file",
            of_cluster(json!({"certificate-authority": "/etc/passwd"})),
            has("clusters[].cluster.certificate-authority"),
        ),
        ("http", at(&format!("http://{LISTENER}")), "only https://".to_owned()),
        (
            "loopback",
            at("https://127.0.0.1:7002"),
            "it is a loopback address".to_owned(),
        ),
        (
            "link-local",
            at("https://169.254.169.254:7003"),
            "it is a link-local address".to_owned(),
        ),
        (
            "mapped",
            at("https://[::ffff:127.0.0.1]:7002"),
            "it is a loopback address".to_owned(),
        ),
        ("hub", at(&hub), "it is the hub's own API server".to_owned()),
        ("bomb", bomb.into_bytes(), "the kubeconfig".to_owned()),
        (
            "large",
            [at(&server), vec![b' '; 900_000]].concat(),
            "the kubeconfig".to_owned(),
        ),
    ]
}

/// Adds an entry for each hostile kubeconfig to a mesh.
async fn add_hostile_members(env: &TestEnv, mesh: &mut Value, hostile: &[(&str, Vec<u8>, String)]) {
    let secrets: Api<Secret> = Api::namespaced(env.client("mgmt").await, NAMESPACE);
    for ((name, kubeconfig, _), m) in hostile.iter().zip(100..) {
        let secret = format!("{name}-kubeconfig");
        let object = json!({"metadata": {"name": secret}, "data": {"value": STANDARD.encode(kubeconfig)}});
        let object: Secret = serde_json::from_value(object).unwrap();
        secrets.create(&PostParams::default(), &object).await.unwrap();
        let networks = [format!("10.{m}.0.0/16"), format!("100.64.{m}.0/24")];
        let entry = json!({"name": name, "kubeconfigSecretRef": {"name": secret}, "allowedNetworks": networks});
        mesh["spec"]["clusters"].as_array_mut().unwrap().push(entry);
    }
}

/// Everything that a user without access to the Secrets can read: status and Events of the mesh, the log, and the admin port.
async fn readable_texts(env: &TestEnv, controller: &Running) -> String {
    let hub = env.hub();
    let objects = hub
        .kubectl(["get", "cmesh,events", "-A", "-o", "yaml"])
        .await
        .unwrap()
        .stdout;
    let pages = [
        env.page("/debug/state").await,
        env.page("/metrics").await,
        env.page("/readyz").await,
    ];
    [objects, controller.log(), pages.concat()].concat()
}

// threat: hostile-kubeconfig, kubeconfig-address, error-oracle
#[tokio::test]
async fn hostile_kubeconfigs_are_named_and_never_dialled() {
    let env = TestEnv::start(&["mgmt", "tenant-a"]).await;
    env.create_node("mgmt", 1, 1).await;
    env.create_node("tenant-a", 2, 1).await;
    let controller_host = env.controller_host();
    controller_host
        .exec(["ip", "addr", "add", "169.254.169.254/32", "dev", "lo"])
        .await
        .unwrap();
    let host = env
        .lab
        .add_host("listener", "172.30.1.201".parse().unwrap())
        .await
        .unwrap();
    let dialled = [
        count_connections(&host, LISTENER),
        count_connections(&controller_host, "127.0.0.1:7002"),
        count_connections(&controller_host, "169.254.169.254:7003"),
    ];
    let proxy = FaultyApi::start(&host, 7004, &env.lab.cluster("tenant-a")).await;
    let original = env.kubeconfig("tenant-a").await;
    env.write_secret("tenant-a", &proxy.kubeconfig(&original)).await;
    let hostile = hostile_kubeconfigs(&env);
    let mut mesh = env.mesh();
    add_hostile_members(&env, &mut mesh, &hostile).await;
    let controller = env.start_controller().await;
    env.apply_mesh(&mesh).await;
    env.until_peers("mgmt", &["prod--tenant-a--tenant-a-1"], LATER).await;

    wait_until("each hostile kubeconfig to be named", LATER, async || {
        let problems = env.get_mesh().await.unwrap().status.unwrap_or_default().problems;
        let message = |member: &str| {
            let of_member = |cluster: &Option<String>| cluster.as_deref() == Some(member);
            problems
                .iter()
                .find(|problem| of_member(&problem.cluster))
                .map_or("", |problem| &problem.message)
        };
        let is_named = |name: &str, text: &str| {
            let message = message(name);
            message.contains(text) && message.contains(&format!("Secret {NAMESPACE}/{name}-kubeconfig key \"value\""))
        };
        let missing = hostile.iter().filter(|(name, _, text)| !is_named(name, text));
        let missing: Vec<String> = missing
            .map(|(name, _, text)| format!("{name}: {text:?} in {:?}", message(name)))
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(missing.join("; "))
        }
    })
    .await
    .unwrap();

    usable_kubeconfigs_are_changed_in_place(&env, &proxy, &original, &mut mesh).await;

    assert_eq!(dialled.map(|count| count.load(Ordering::Relaxed)), [0; 3]);
    let texts = readable_texts(&env, &controller).await;
    let token = original
        .lines()
        .find_map(|line| line.trim().strip_prefix("token: "))
        .unwrap();
    for secret in [SECRET, token, "s3cr3t", "/etc/passwd"] {
        let line = texts.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "{secret}");
    }
    assert!(texts.contains("kubeconfig read"), "the log was read");
}

/// The resourceVersions of all objects of the controller, without the mesh.
async fn versions(env: &TestEnv) -> BTreeMap<String, String> {
    let mut versions = env.versions().await;
    versions.remove("mesh");
    versions
}

/// Writes the keys of the member's Secret.
async fn write_keys(env: &TestEnv, data: &[(&str, &str)]) {
    let data: BTreeMap<&str, String> = data.iter().map(|(key, text)| (*key, STANDARD.encode(text))).collect();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "tenant-a-kubeconfig", "namespace": NAMESPACE}, "data": data,
    });
    env.hub().apply(&secret.to_string()).await.unwrap();
}

/// Waits until the problem of tenant-a contains `text`; `None` = until it has no problem, and its row names this key and context.
async fn until_tenant(env: &TestEnv, text: Option<&str>, reference: (&str, Option<&str>)) {
    wait_until(format!("{text:?} in the problem of tenant-a"), LATER, async || {
        let status = env.get_mesh().await.unwrap().status.unwrap();
        let problem = status
            .problems
            .iter()
            .find(|problem| problem.cluster.as_deref() == Some("tenant-a"));
        let row = status.clusters.iter().find(|row| row.name == "tenant-a").unwrap();
        let named = row.kubeconfig_secret_ref.as_ref().unwrap();
        let is_current = (&*named.key, named.context.as_deref()) == reference && row.reachable == Some(true);
        match (problem, text) {
            (None, None) if is_current => Ok(()),
            (Some(problem), Some(text)) if problem.message.contains(text) => Ok(()),
            _ => Err(format!("{problem:?}, {row:?}")),
        }
    })
    .await
    .unwrap();
}

/// Changes of tenant-a's kubeconfig, after each of which the member is reachable again. The controller writes no object.
async fn usable_kubeconfigs_are_changed_in_place(env: &TestEnv, proxy: &FaultyApi, original: &str, mesh: &mut Value) {
    let value = ("value", None);
    until_tenant(env, None, value).await;
    let before = versions(env).await;

    proxy.set(Some(Fault::OtherAuthority));
    until_tenant(env, Some("does not answer"), value).await;
    env.write_secret("tenant-a", &proxy.kubeconfig_with_other_authority(original))
        .await;
    until_tenant(env, None, value).await;
    proxy.set(None);

    env.write_secret("tenant-a", "[").await;
    until_tenant(env, Some("does not parse"), value).await;
    env.write_secret("tenant-a", &proxy.kubeconfig(original)).await;
    until_tenant(env, None, value).await;

    // A new account invalidates the token. The API server does not end open watches because of this; `proxy.set` closes them.
    let account = |verb| [verb, "serviceaccount", "-n", NAMESPACE, "clustermesh-controller"];
    env.lab.cluster("tenant-a").kubectl(account("delete")).await.unwrap();
    env.lab.cluster("tenant-a").kubectl(account("create")).await.unwrap();
    wait_until("the token to be refused", LATER, async || {
        proxy.set(None);
        let problems = env.get_mesh().await.unwrap().status.unwrap().problems;
        let is_refused = |message: &str| message.contains("(401): renew the kubeconfig in the Secret");
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        match problems.iter().any(|problem| is_refused(&problem.message)) {
            true => Ok(()),
            false => Err(format!("{problems:?}")),
        }
    })
    .await
    .unwrap();
    let renewed = proxy.kubeconfig(&env.kubeconfig("tenant-a").await);
    env.write_secret("tenant-a", &renewed).await;
    until_tenant(env, None, value).await;

    // The entry names another key of the Secret. The kubeconfig under this key has a current-context that is none of its
    // contexts, so the entry must also name a context.
    let mut two: Value = serde_json::from_str(&renewed).unwrap();
    two["current-context"] = json!("other");
    write_keys(env, &[("value", &renewed), ("second", &two.to_string())]).await;
    let reference = &mut mesh["spec"]["clusters"][1]["kubeconfigSecretRef"];
    reference["key"] = json!("second");
    env.apply_mesh(mesh).await;
    until_tenant(env, Some("current-context"), value).await;
    mesh["spec"]["clusters"][1]["kubeconfigSecretRef"]["context"] = json!("c");
    env.apply_mesh(mesh).await;
    until_tenant(env, None, ("second", Some("c"))).await;
    write_keys(env, &[("second", &two.to_string())]).await;

    // The Peer of this new node is written last: once it exists, any rewrite of other objects would be visible.
    env.create_node("tenant-a", 2, 2).await;
    let peers = ["prod--tenant-a--tenant-a-1", "prod--tenant-a--tenant-a-2"];
    env.until_peers("mgmt", &peers, SOON).await;
    let mut after = versions(env).await;
    after.remove("mgmt Peer/prod--tenant-a--tenant-a-2");
    assert_eq!(after, before);
}
