//! Tests members whose credentials expire: a token and client certificates of a real API server, and tokens with hostile dates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use clustermesh_api::mesh::{ClusterStatus, MeshProblem};
use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::test_env::{EVENTS, LATER, SOON, TestEnv};
use k8s_openapi::{
    api::{
        authentication::v1::{TokenRequest, TokenRequestSpec},
        core::v1::ServiceAccount,
    },
    jiff::Timestamp,
};
use kube::{Api, api::PostParams};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

use crate::operator::{self, clustermeshctl};

const MEMBER: &str = "tenant-a";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn time(seconds: u64) -> Timestamp {
    Timestamp::from_second(i64::try_from(seconds).unwrap()).unwrap()
}

/// A new token of the controller's ServiceAccount in the member, and when it expires, as the API server says.
async fn token(env: &TestEnv) -> (String, Timestamp) {
    let accounts: Api<ServiceAccount> = Api::namespaced(env.client(MEMBER).await, NAMESPACE);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            expiration_seconds: Some(24 * 3600),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let params = PostParams::default();
    let request = accounts.create_token_request("clustermesh-controller", &params, &request);
    let status = request.await.unwrap().status.unwrap();
    (status.token.unwrap(), status.expiration_timestamp.unwrap().0)
}

/// Writes the member's Secret with a kubeconfig in which these lines replace the user's token.
async fn write_credentials(env: &TestEnv, credentials: &str) {
    let kubeconfig = env.kubeconfig(MEMBER).await;
    let (before, _) = kubeconfig.split_once("    token: ").unwrap();
    env.write_secret(MEMBER, &format!("{before}{credentials}")).await;
}

/// A certificate of the member's CA for the controller's account, valid from 2020 until this time.
fn certificate(env: &TestEnv, expires: u64) -> String {
    let key = env.lab.directory().join(MEMBER).join("pki/ca.key");
    let ca_key = KeyPair::from_pem(&std::fs::read_to_string(key).unwrap()).unwrap();
    let name = |common: &str| {
        let mut name = DistinguishedName::new();
        name.push(DnType::CommonName, common);
        name
    };
    let mut ca = CertificateParams::default();
    ca.distinguished_name = name(&format!("{MEMBER}-ca"));
    let mut client = CertificateParams::default();
    client.distinguished_name = name(&format!("system:serviceaccount:{NAMESPACE}:clustermesh-controller"));
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    client.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    client.not_before = date_time_ymd(2020, 1, 1);
    client.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(expires);
    let key = KeyPair::generate().unwrap();
    let certificate = client.signed_by(&key, &Issuer::new(ca, ca_key)).unwrap().pem();
    let [certificate, key] = [certificate, key.serialize_pem()].map(|pem| STANDARD.encode(pem));
    format!("    client-certificate-data: {certificate}\n    client-key-data: {key}\n")
}

async fn row(env: &TestEnv) -> ClusterStatus {
    let rows = env.get_mesh().await.unwrap().status.unwrap().clusters;
    rows.into_iter().find(|row| row.name == MEMBER).unwrap()
}

async fn until_reported_expiry(env: &TestEnv, want: Option<Timestamp>) {
    wait_until(format!("credentialsExpire {want:?}"), LATER, async || {
        let expires = row(env).await.credentials_expire.map(|time| time.0);
        if expires == want {
            Ok(())
        } else {
            Err(format!("{expires:?}"))
        }
    })
    .await
    .unwrap();
}

/// The first problem in the mesh's status that has this reason.
async fn problem(env: &TestEnv, reason: &str) -> MeshProblem {
    let problems = env.get_mesh().await.unwrap().status.unwrap().problems;
    let found = problems.iter().find(|problem| problem.reason == reason);
    found.cloned().unwrap_or_else(|| panic!("no {reason}: {problems:?}"))
}

#[tokio::test]
async fn credentials_that_expire_are_reported_until_renewed() {
    let (env, _controller) = TestEnv::start_meshed(&["mgmt", MEMBER]).await;
    let flags = operator::flags(&env, &["mgmt"]);
    let (first, expires) = token(&env).await;
    write_credentials(&env, &format!("    token: {first}\n")).await;
    until_reported_expiry(&env, Some(expires)).await;
    // A token for a day counts as expiring only in its last tenth, and this one is new.
    env.until_condition("Degraded", "False/AllServed", SOON).await;

    // A certificate that has been valid for years and expires in two days.
    let soon = now() + 2 * 24 * 3600;
    write_credentials(&env, &certificate(&env, soon)).await;
    env.until_condition("Degraded", "True/CredentialsExpiring", LATER).await;
    env.until_condition("Ready", "True/Meshed", SOON).await;
    until_reported_expiry(&env, Some(time(soon))).await;
    let expiring = problem(&env, "CredentialsExpiring").await;
    let date = time(soon).to_string();
    let message = format!(
        "cluster {MEMBER:?}: the client certificate in Secret {NAMESPACE}/{MEMBER}-kubeconfig key value expires at {date}. "
    );
    assert!(expiring.message.starts_with(&message), "{}", expiring.message);
    assert_eq!(expiring.cluster.as_deref(), Some(MEMBER));
    let (code, out, _) = clustermeshctl(&["status"], &flags).await;
    assert_eq!(code, "1", "{out}");
    let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        text.contains(&format!(
            "{MEMBER}: CredentialsExpiring: the client certificate in Secret"
        )),
        "{out}"
    );
    let metric = format!(
        "clustermesh_controller_member_credentials_expiry_timestamp_seconds{{mesh=\"{NAMESPACE}/prod\",cluster=\"{MEMBER}\"}} {soon}"
    );
    let metrics = env.page("/metrics").await;
    assert!(metrics.lines().any(|line| line == metric), "{metrics}");

    // This certificate expires in 20 s. Only the clock changes between the reports CredentialsExpiring and CredentialsExpired.
    let soon = now() + 20;
    write_credentials(&env, &certificate(&env, soon)).await;
    until_reported_expiry(&env, Some(time(soon))).await;
    wait_until("the certificate to count as expired", LATER, async || {
        let problems = env.get_mesh().await.unwrap().status.unwrap().problems;
        let reasons: Vec<String> = problems.into_iter().map(|problem| problem.reason).collect();
        if reasons.iter().any(|reason| reason == "CredentialsExpired") {
            Ok(())
        } else {
            Err(format!("{reasons:?}"))
        }
    })
    .await
    .unwrap();
    let expired = problem(&env, "CredentialsExpired").await;
    assert!(
        expired.message.contains(&format!("expired at {}", time(soon))),
        "{}",
        expired.message
    );
    assert!(expired.since.0 >= time(soon), "{expired:?}");

    let (renewed, expires) = token(&env).await;
    write_credentials(&env, &format!("    token: {renewed}\n")).await;
    until_reported_expiry(&env, Some(expires)).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
    env.until_condition("Degraded", "False/AllServed", LATER).await;
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let published = |reason: &str| events.lines().filter(|line| line.starts_with(reason)).count();
    assert!(
        published("CredentialsExpiring") >= 1 && published("CredentialsExpired") == 1,
        "{events}"
    );
}

// threat: hostile-kubeconfig
#[tokio::test]
async fn hostile_expiry_breaks_no_status_and_reveals_no_token() {
    let (env, controller) = TestEnv::start_meshed(&["mgmt", MEMBER]).await;
    let jwt = |claims: &str| {
        let [header, claims] = [r#"{"alg":"none"}"#, claims].map(|part| URL_SAFE_NO_PAD.encode(part));
        format!("{header}.{claims}.c2VjcmV0")
    };
    let mut tokens = Vec::new();
    for (claims, expires) in [
        (r#"{"exp": -99999999999999}"#, Some(0)),
        (r#"{"exp": 315537897599999}"#, None),
        (r#"{"exp": 7.5, "iat": 1e308}"#, Some(7)),
        (r#"{"exp": "tomorrow"}"#, None),
    ] {
        tokens.push(jwt(claims));
        write_credentials(&env, &format!("    token: {}\n", tokens[tokens.len() - 1])).await;
        until_reported_expiry(&env, expires.map(time)).await;
    }
    env.until_condition("Ready", "False/MemberStale", LATER).await;
    let status = serde_json::to_string(&env.get_mesh().await.unwrap().status).unwrap();
    let events = env.hub().kubectl(EVENTS).await.unwrap().stdout;
    let (log, state) = (controller.log(), env.page("/debug/state").await);
    for part in tokens.iter().flat_map(|token| token.split('.')) {
        for text in [&status, &events, &log, &state] {
            assert!(!text.contains(part), "{part} in {text}");
        }
    }
    env.write_secret(MEMBER, &env.kubeconfig(MEMBER).await).await;
    env.until_condition("Ready", "True/Meshed", LATER).await;
}
