//! Runs clustermeshctl as an operator with a kubeconfig for several clusters.

use std::process::ExitCode;

use clustermesh_tests::{kubeconfig::merged_kubeconfig, test_env::TestEnv};

/// Writes a kubeconfig with a context for each of these clusters. Returns the flags that name it and the context of the hub.
pub(crate) fn flags(env: &TestEnv, clusters: &[&str]) -> Vec<String> {
    let kubeconfig = env.lab.directory().join("operator.kubeconfig");
    let clusters: Vec<_> = clusters.iter().map(|name| env.lab.cluster(name)).collect();
    let merged = merged_kubeconfig(&clusters, |cluster| cluster.kubeconfig().unwrap());
    std::fs::write(&kubeconfig, merged).unwrap();
    vec![
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--context={}", env.hub_name()),
    ]
}

/// Runs clustermeshctl. Returns its exit code, standard output and standard error.
pub(crate) async fn clustermeshctl(words: &[&str], flags: &[String]) -> (String, String, String) {
    let words = ["clustermeshctl"].iter().chain(words).map(|word| (*word).to_owned());
    let args: Vec<String> = words.chain(flags.iter().cloned()).collect();
    let run = move || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = clustermeshctl::run(args, &mut std::io::empty(), &mut out, &mut err);
        (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    };
    let (code, out, err) = tokio::task::spawn_blocking(run).await.unwrap();
    let known = (0..=3).find(|number| format!("{:?}", ExitCode::from(*number)) == format!("{code:?}"));
    (
        known.map_or_else(|| format!("{code:?}"), |number: u8| number.to_string()),
        out,
        err,
    )
}
