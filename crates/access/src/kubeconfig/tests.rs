use super::*;

const CLUSTER: &str = "server: https://192.0.2.1:6443\n    certificate-authority-data: Y2E=";
const USER: &str = "token: t0ken";

fn text(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
         clusters:\n- name: k\n  cluster:\n    {cluster}\nusers:\n- name: u\n  user:\n    {user}\n"
    )
}

fn verdict(cluster: &str, user: &str) -> String {
    let hub = HubHosts::from([("10.96.0.1".to_owned(), 443)]);
    match sanitise(text(cluster, user).as_bytes(), None, &hub) {
        Ok(_) => "accepted".to_owned(),
        Err(refused) => refused.to_string(),
    }
}

#[test]
fn a_token_or_a_client_certificate_over_https_with_an_inline_ca_is_accepted() {
    assert_eq!(verdict(CLUSTER, USER), "accepted");
    assert_eq!(
        verdict(CLUSTER, "client-certificate-data: Yw==\n    client-key-data: aw=="),
        "accepted"
    );
    let named = CLUSTER.replace("192.0.2.1", "api.tenant.example.org") + "\n    tls-server-name: other";
    assert_eq!(verdict(&named, USER), "accepted");
}

#[test]
fn every_user_field_that_lends_the_controllers_own_power_is_refused_by_name() {
    for (user, field) in [
        ("exec: {apiVersion: v1, command: sh}", "users[].user.exec"),
        ("auth-provider: {name: oidc, config: {}}", "users[].user.auth-provider"),
        (
            "tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token",
            "users[].user.tokenFile",
        ),
        ("token: t\n    tokenFile: /x", "users[].user.tokenFile"),
        (
            "client-certificate: /x",
            "users[].user.client-certificate (a file path)",
        ),
        ("client-key: /x", "users[].user.client-key (a file path)"),
        ("username: admin\n    password: x", "users[].user.username or password"),
        ("token: t\n    as: admin", "users[].user.as (impersonation)"),
        ("token: t\n    as-uid: x", "users[].user.as (impersonation)"),
        (
            "token: t\n    as-groups: [system:masters]",
            "users[].user.as (impersonation)",
        ),
        (
            "token: t\n    as-user-extra: {a: [b]}",
            "users[].user.as (impersonation)",
        ),
    ] {
        let verdict = verdict(CLUSTER, user);
        assert!(
            verdict.starts_with(&format!("the kubeconfig has {field}, which is refused: ")),
            "{user}: {verdict}"
        );
    }
    assert!(verdict(CLUSTER, "client-certificate-data: Yw==").contains("lacks users[].user.client-certificate-data"));
    assert!(verdict(CLUSTER, "{}").contains("lacks users[].user.token"));
}

#[test]
fn every_cluster_field_that_weakens_the_connection_is_refused_by_name() {
    for (extra, field) in [
        (
            "insecure-skip-tls-verify: true",
            "clusters[].cluster.insecure-skip-tls-verify",
        ),
        (
            "certificate-authority: /x",
            "clusters[].cluster.certificate-authority (a file path)",
        ),
        ("proxy-url: http://192.0.2.9", "clusters[].cluster.proxy-url"),
    ] {
        let verdict = verdict(&format!("{CLUSTER}\n    {extra}"), USER);
        assert!(
            verdict.starts_with(&format!("the kubeconfig has {field}, which is refused: ")),
            "{extra}: {verdict}"
        );
    }
    assert!(verdict("server: https://192.0.2.1", USER).contains("lacks clusters[].cluster.certificate-authority-data"));
    assert!(verdict("certificate-authority-data: Y2E=", USER).contains("lacks clusters[].cluster.server"));
}

#[test]
fn servers_that_are_the_controllers_own_surroundings_are_refused() {
    for (server, why) in [
        ("http://192.0.2.1", "only https://"),
        ("https://127.0.0.1:6443", "loopback"),
        ("https://[::1]:6443", "loopback"),
        ("https://[::ffff:127.0.0.1]:6443", "loopback"),
        ("https://localhost:6443", "the controller's own host"),
        ("https://x.localhost.", "the controller's own host"),
        ("https://169.254.169.254", "link-local"),
        ("https://[fe80::1]", "link-local"),
        ("https://0.0.0.0:6443", "no address of a host"),
        ("https://10.96.0.1", "the hub's own API server"),
        ("https://kubernetes.default.svc", "the hub's own API server"),
        ("https://127.1", "is not valid"),
        ("https://2130706433", "is not valid"),
        ("https://a@192.0.2.1", "user name in the URL"),
        ("not a url", "is not valid"),
    ] {
        let verdict = verdict(
            &CLUSTER.replace("https://192.0.2.1:6443", &format!("\"{server}\"")),
            USER,
        );
        assert!(verdict.contains(why), "{server}: {verdict}");
    }
}

#[test]
fn what_is_no_kubeconfig_is_refused_without_repeating_it() {
    let read = |bytes: &[u8], context| sanitise(bytes, context, &HubHosts::new()).expect_err("refused");
    assert_eq!(read(b"\xff", None), Refused::Malformed);
    assert_eq!(read(b"[secret", None), Refused::Malformed);
    assert_eq!(read(&vec![b'a'; MAX_BYTES + 1], None), Refused::TooLarge);
    assert!(matches!(
        read(b"{}", None),
        Refused::Lacks {
            field: "current-context",
            ..
        }
    ));
    let good = text(CLUSTER, USER);
    assert!(matches!(
        read(good.as_bytes(), Some("x")),
        Refused::Lacks {
            field: "the context that is asked for",
            ..
        }
    ));
}

#[test]
fn nothing_that_was_not_checked_reaches_the_client() {
    let given = text(
        &format!("{CLUSTER}\n    disable-compression: true\n    zzz: 1"),
        &format!("{USER}\n    zzz: 1"),
    );
    let clean = sanitise(given.as_bytes(), Some("c"), &HubHosts::new()).expect("accepted");
    let (cluster, user) = (
        clean.clusters[0].cluster.as_ref().expect("a cluster"),
        clean.auth_infos[0].auth_info.as_ref().expect("a user"),
    );
    assert!(cluster.other.is_empty() && user.other.is_empty() && cluster.disable_compression.is_none());
}
