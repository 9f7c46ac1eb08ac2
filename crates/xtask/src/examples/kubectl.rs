//! Checks the kubectl commands in the documents: resources and files exist, our programs read the annotations and labels, and accept
//! the arguments that are patched into a workload.

use std::collections::BTreeSet;

use clap::CommandFactory;
use clustermesh_api::{crds, names};
use serde::Deserialize;
use xtask::programs::root;

use super::{pages, shell};

/// Built-in resources of Kubernetes that the documents use.
const BUILT_IN: &[&str] = &[
    "clusterrolebinding",
    "configmap",
    "daemonset",
    "deployment",
    "endpointslices",
    "lease",
    "leases",
    "node",
    "nodes",
    "pods",
    "rolebinding",
    "secret",
    "serviceaccount",
    "services",
];

/// Flags of kubectl whose value is the next word.
const WITH_VALUE: &[&str] = &[
    "--context",
    "--kubeconfig",
    "-n",
    "-l",
    "-L",
    "-o",
    "-f",
    "-p",
    "--type",
];

/// Commands of kubectl whose first argument is a resource.
const ON_RESOURCES: &[&str] = &["annotate", "create", "delete", "describe", "get", "label", "patch"];

/// Annotations and labels that users set.
const KEYS: &[&str] = &[
    names::ADOPT_HUB,
    names::KILO_CLUSTERMESH_ENDPOINT,
    names::LABEL_HUB,
    names::LABEL_MESH,
    names::PAUSED,
    names::QUARANTINE,
    // Read by clusterctl.
    "clusterctl.cluster.x-k8s.io/move",
    "kilo-clustermesh.io/wg-agent",
];

/// All names of our resources that kubectl accepts.
fn own_resources() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for crd in crds::all() {
        let names = crd.spec.names;
        found.extend(
            [Some(names.plural), names.singular, Some(names.kind.to_lowercase())]
                .into_iter()
                .flatten(),
        );
        found.extend(names.short_names.into_iter().flatten());
    }
    found
}

/// One operation of a JSON patch.
#[derive(Deserialize)]
struct Operation {
    path: String,
    #[serde(default)]
    value: serde_json::Value,
}

/// The faults of a command, which is given without the word `kubectl`.
fn faults(words: &[String], own: &BTreeSet<String>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut arguments: Vec<&str> = Vec::new();
    let mut patches: Vec<&str> = Vec::new();
    let mut words = words.iter().map(String::as_str).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        let value = WITH_VALUE.contains(&word).then(|| words.next()).flatten();
        match (word, value) {
            ("-f", Some(file)) if ["crds/", "deploy/"].iter().any(|folder| file.starts_with(folder)) => {
                if !root().join(file).exists() {
                    faults.push(format!("there is no {file}"));
                }
            }
            ("-p", Some(patch)) => patches.push(patch),
            _ if word.starts_with("-p=") => patches.push(&word["-p=".len()..]),
            _ if word.starts_with('-') => {}
            _ => arguments.push(word),
        }
    }
    let resources = match arguments[..] {
        ["rollout", _, resources, ..] => resources,
        [verb, resources, ..] if ON_RESOURCES.contains(&verb) => resources,
        _ => "",
    };
    for resource in resources.split(',').filter(|resource| !resource.is_empty()) {
        let kind = resource.split('/').next().unwrap_or_default();
        if !BUILT_IN.contains(&kind) && !own.contains(kind) {
            faults.push(format!(
                "no CRD of ours has the resource {kind:?}, and BUILT_IN does not list it"
            ));
        }
    }
    if let ["annotate" | "label", ..] = arguments[..] {
        let keys = arguments
            .iter()
            .filter_map(|argument| argument.split_once('='))
            .map(|(key, _)| key);
        faults.extend(
            keys.filter(|key| !KEYS.contains(key))
                .map(|key| format!("no program reads {key:?}")),
        );
    }
    faults.extend(patches.into_iter().flat_map(patch_faults));
    faults
}

/// The faults of a JSON patch. If it sets `args`, wg-agent must accept them.
fn patch_faults(patch: &str) -> Vec<String> {
    let operations: Vec<Operation> = match serde_json::from_str(patch) {
        Ok(operations) => operations,
        Err(error) => return vec![format!("not a JSON patch: {error}")],
    };
    let arguments = operations.iter().filter(|operation| operation.path.ends_with("/args"));
    let faults = arguments.filter_map(|operation| {
        let words = operation
            .value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|word| word.as_str());
        let line = std::iter::once("wg-agent").chain(words);
        wg_agent::args::Cli::command().try_get_matches_from(line).err()
    });
    faults.map(|error| error.to_string()).collect()
}

#[test]
fn kubectl_commands_in_the_documents_have_no_faults() {
    let own = own_resources();
    let mut found = String::new();
    let mut checked = 0;
    for block in pages().into_iter().flat_map(|page| page.blocks) {
        for words in shell::commands(&block) {
            // In `deploy/member-kubeconfig.sh URL kubectl --context tenant-a`, kubectl is an argument.
            let [program, words @ ..] = &words[..] else { continue };
            if program == "kubectl" {
                checked += 1;
                for fault in faults(words, &own) {
                    found += &format!("\n{}: kubectl {}: {fault}", block.position, words.join(" "));
                }
            }
        }
    }
    assert!(checked > 30, "only {checked} commands were found");
    assert!(found.is_empty(), "kubectl commands that do not work:{found}");
}

#[test]
fn wrong_kubectl_commands_are_reported() {
    let own = own_resources();
    let cases: [(&str, &[&str]); 5] = [
        ("--context a get clustermesh,peers -A -o wide", &[]),
        (
            "get peer,peerrules -A",
            &["no CRD of ours has the resource \"peerrules\", and BUILT_IN does not list it"],
        ),
        (
            "apply -f crds/none.yaml -f deploy/agent.yaml",
            &["there is no crds/none.yaml"],
        ),
        (
            "annotate node NODE kilo.squat.ai/endpoint-mesh=x",
            &["no program reads \"kilo.squat.ai/endpoint-mesh\""],
        ),
        ("-n x rollout status daemonset/wg-agent", &[]),
    ];
    for (line, want) in cases {
        assert_eq!(faults(&shell::split(line)[0], &own), want, "{line}");
    }
    let patch = r#"[{"op": "replace", "path": "/spec/args", "value": ["--mode=both"]}]"#;
    assert!(patch_faults(patch)[0].contains("invalid value 'both' for '--mode <MODE>'"));
}
