use super::*;

const CLUSTER: &str = "server: https://192.0.2.1:6443\n    certificate-authority-data: Y2E=";
const USER: &str = "token: t0ken";

fn kubeconfig_yaml(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: {{cluster: k, user: u}}\n\
         clusters:\n- name: k\n  cluster:\n    {cluster}\nusers:\n- name: u\n  user:\n    {user}\n"
    )
}

fn verdict(cluster: &str, user: &str) -> String {
    let hub = HubHosts::new([("10.96.0.1".to_owned(), 443)]);
    match sanitise(kubeconfig_yaml(cluster, user).as_bytes(), None, &hub) {
        Ok(_) => "accepted".to_owned(),
        Err(refused) => refused.to_string(),
    }
}

#[test]
fn token_or_client_certificate_with_inline_ca_is_accepted() {
    assert_eq!(verdict(CLUSTER, USER), "accepted");
    assert_eq!(
        verdict(CLUSTER, "client-certificate-data: Yw==\n    client-key-data: aw=="),
        "accepted"
    );
    let named = CLUSTER.replace("192.0.2.1", "api.tenant.example.org") + "\n    tls-server-name: other";
    assert_eq!(verdict(&named, USER), "accepted");
}

// threat: hostile-kubeconfig
#[test]
fn user_with_forbidden_missing_or_invalid_field_is_refused() {
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
    for token in [r#""t0ken\n""#, r#""t0\rken""#] {
        let verdict = verdict(CLUSTER, &format!("token: {token}"));
        assert!(verdict.contains("users[].user.token is not valid"), "{verdict}");
    }
}

// threat: hostile-kubeconfig
#[test]
fn cluster_with_forbidden_or_missing_field_is_refused() {
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

// threat: kubeconfig-address
#[test]
fn forbidden_or_malformed_servers_are_refused() {
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
        ("https://[64:ff9b::a9fe:a9fe]", "link-local"),
        ("https://[64:ff9b::a60:1]", "the hub's own API server"),
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
fn only_names_of_the_service_kubernetes_belong_to_the_hub() {
    let is_hub = |host: &str| HubHosts::default().has_host(host, 443);
    let names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc.cluster.local",
    ];
    assert_eq!(names.map(is_hub), [true; 3]);
    assert!(!is_hub("kubernetes.default-tenant.example.org"));
}

// threat: error-oracle
#[test]
fn refusal_contains_no_text_of_the_kubeconfig() {
    // All fields of `Refused` are static texts, so none of its messages can contain a part of the kubeconfig.
    let read = |bytes: &[u8], context| sanitise(bytes, context, &HubHosts::default()).expect_err("refused");
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
    let good = kubeconfig_yaml(CLUSTER, USER);
    assert!(matches!(
        read(good.as_bytes(), Some("x")),
        Refused::Lacks {
            field: "the selected context",
            ..
        }
    ));
}

// threat: hostile-kubeconfig
#[test]
fn unchecked_fields_do_not_reach_the_client() {
    let given = kubeconfig_yaml(
        &format!("{CLUSTER}\n    disable-compression: true\n    zzz: 1"),
        &format!("{USER}\n    zzz: 1"),
    );
    let clean = sanitise(given.as_bytes(), Some("c"), &HubHosts::default()).expect("accepted");
    let (cluster, user) = (
        clean.clusters[0].cluster.as_ref().expect("a cluster"),
        clean.auth_infos[0].auth_info.as_ref().expect("a user"),
    );
    assert!(cluster.other.is_empty() && user.other.is_empty() && cluster.disable_compression.is_none());
}

// threat: kubeconfig-address
#[test]
fn forbidden_ipv4_address_is_refused_also_inside_ipv6() {
    let reason = |text: &str| match check_address(text.parse().expect("an address")) {
        Ok(()) => "accepted".to_owned(),
        Err(refused) => refused
            .to_string()
            .rsplit("it is ")
            .next()
            .unwrap_or_default()
            .to_owned(),
    };
    let (loopback, link_local) = ("a loopback address", "a link-local address");
    for (text, verdict) in [
        ("64:ff9b::7f00:1", loopback),
        ("64:ff9b::169.254.169.254", link_local),
        ("64:ff9b::192.0.2.1", "accepted"),
        // Local-use NAT64 prefixes (RFC 8215) of each possible length.
        ("64:ff9b:1:7f00:0:100::", loopback),
        ("64:ff9b:1:7f:0:1::", loopback),
        ("64:ff9b:1:0:7f:1::", loopback),
        ("64:ff9b:1::127.0.0.1", loopback),
        ("64:ff9b:1:fffe::169.254.169.254", link_local),
        ("64:ff9b:1::192.0.2.1", "accepted"),
        ("64:ff9b:1:fffe::192.0.2.1", "accepted"),
        // An unknown NAT64 prefix: only a loopback or link-local address at the end is refused.
        ("2001:db8:64::169.254.169.254", link_local),
        ("2001:db8:64::192.0.2.1", "accepted"),
        ("2001:db8::1", "accepted"),
        ("::ffff:127.0.0.1", loopback),
        ("::ffff:0:127.0.0.1", loopback),
        ("::127.0.0.1", loopback),
        // 6to4 (RFC 3056).
        ("2002:7f00:1::1", loopback),
        ("2002:c000:201::1", "accepted"),
        // Teredo: first with 127.0.0.1 as the client (its bits are stored inverted), then with 127.0.0.1 as the server.
        ("2001:0:c000:201:0:0:80ff:fffe", loopback),
        ("2001:0:7f00:1:0:0:3fff:fdfe", loopback),
        // ISATAP (RFC 5214).
        ("2001:db8::200:5efe:169.254.169.254", link_local),
        // IPv4 itself.
        ("0.1.2.3", "no address of a host"),
        ("255.255.255.255", "no address of a host"),
    ] {
        assert_eq!(reason(text), verdict, "{text}");
    }
}
