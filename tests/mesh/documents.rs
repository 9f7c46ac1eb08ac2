//! Runs the commands of README.md and docs/operations on two whole clusters, in the order in which an operator needs them.
//! Placeholders are replaced, `wg-agent status` runs with another PATH, and the test waits for the log before the last command of the
//! `cleanup` block. A command block that is neither run nor listed in [`NOT_RUN`] fails the test.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use clustermesh_lab::{Lab, LabPlan, Output, ProductImages, wait_until, workspace_program};

use crate::setup::{HUB, MEMBER, PATIENCE, merged_kubeconfig};

/// Command blocks that do not run here: the page, words of the block, and the reason.
const NOT_RUN: [(&str, &str, &str); 8] = [
    (
        "README.md",
        "cargo xtask demo",
        "the block starts other clusters, and this test itself (with `cargo xtask test`)",
    ),
    ("README.md", "podman push", "the lab has no registry"),
    (
        "clustermeshctl.md",
        "cargo build --release",
        "the tests have built the program",
    ),
    (
        "clustermeshctl.md",
        "clustermeshctl explain notebooks",
        "needs a sandbox: mesh::sandbox runs it",
    ),
    (
        "clustermeshctl.md",
        "clustermeshctl verify",
        "needs a sandbox: mesh::sandbox runs it",
    ),
    (
        "migration.md",
        "clusterctl move",
        "needs two hubs: reconcile::moved runs the commands",
    ),
    ("install.md", "modules-load.d", "the lab's nodes have no systemd"),
    ("install.md", "systemctl enable", "the lab's nodes have no systemd"),
];

/// Replaces the `editor` command of install.md: sets `networks` and `reachable` to the values in the comment after that command.
const EDITOR: &str = "#!/bin/sh
sed -i -e 's|# networks: .*|networks: 10.10.0.0/16, 172.16.1.0/24, 10.11.0.0/16|' \\
  -e 's|# reachable: .*|reachable: 10.20.0.0/16, 172.16.2.0/24, 10.21.0.0/16|' \"$1\"
";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The path of a page, which is README.md or a name in docs/operations.
fn path(page: &str) -> PathBuf {
    if page == "README.md" {
        repository().join(page)
    } else {
        repository().join("docs/operations").join(page)
    }
}

/// The code blocks of a page: language and text.
fn blocks(page: &str) -> Vec<(String, String)> {
    let text = fs::read_to_string(path(page)).unwrap();
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push((language.to_owned(), block.join("\n")));
        }
    }
    blocks
}

/// The scripts of a page: its `sh` blocks, and the commands of its `console` blocks without what they print.
fn scripts(page: &str) -> Vec<String> {
    let script = |(language, text): (String, String)| match &*language {
        "sh" => Some(text),
        "console" => {
            let commands: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
            Some(commands.join("\n"))
        }
        _ => None,
    };
    blocks(page).into_iter().filter_map(script).collect()
}

/// An operator with the repository's manifests, kubectl and clustermeshctl, who works from a machine on the underlay.
struct Operator<'a> {
    lab: &'a Lab,
    /// A copy of `crds/` and `deploy/`, which some commands change.
    directory: tempfile::TempDir,
    /// The scripts that were run, with their placeholders.
    run: BTreeSet<String>,
}

impl<'a> Operator<'a> {
    async fn new(lab: &'a Lab) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let programs = directory.path().join("bin");
        fs::create_dir(&programs).unwrap();
        for (name, program) in [
            ("kubectl", lab.tools().path("kubectl").unwrap()),
            ("clustermeshctl", workspace_program("clustermeshctl").unwrap()),
        ] {
            std::os::unix::fs::symlink(program, programs.join(name)).unwrap();
        }
        fs::write(programs.join("editor"), EDITOR).unwrap();
        let clusters = [lab.cluster(HUB), lab.cluster(MEMBER)];
        let kubeconfig = merged_kubeconfig(&clusters, |cluster| cluster.inside_kubeconfig().unwrap());
        fs::write(directory.path().join("kubeconfig"), kubeconfig).unwrap();
        let operator = Self {
            lab,
            directory,
            run: BTreeSet::new(),
        };
        let copy = format!(
            "cp -r {0}/crds {0}/deploy . && chmod +x bin/editor",
            repository().display()
        );
        operator.shell(&copy).await;
        operator
    }

    /// Runs a script of bash in the directory, with the hub as the current context.
    async fn shell(&self, script: &str) -> Output {
        let directory = self.directory.path().display();
        // Commands that still run in the background would keep the output open, so they are killed at the end.
        let script = format!("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}");
        let words = [
            "env",
            "-C",
            &directory.to_string(),
            &format!("PATH={directory}/bin:{}", std::env::var("PATH").unwrap()),
            &format!("KUBECONFIG={directory}/kubeconfig"),
            "timeout",
            "120",
            "bash",
            "-euo",
            "pipefail",
            "-c",
            &script,
        ];
        self.lab
            .underlay_exec(words)
            .await
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// The only script of the page that contains these words. It counts as run.
    fn script(&mut self, page: &str, words: &str, placeholders: &[(&str, &str)]) -> String {
        let mut found: Vec<String> = scripts(page)
            .into_iter()
            .filter(|script| script.contains(words))
            .collect();
        assert_eq!(found.len(), 1, "scripts of {page} with {words:?}: {found:#?}");
        let script = found.remove(0);
        self.run.insert(script.clone());
        placeholders.iter().fold(script, |script, (placeholder, value)| {
            assert!(script.contains(placeholder), "{page}: no {placeholder} in {script}");
            script.replace(placeholder, value)
        })
    }

    /// Runs a script of a page and returns what it prints.
    async fn run(&mut self, page: &str, words: &str, placeholders: &[(&str, &str)]) -> String {
        let script = self.script(page, words, placeholders);
        println!("{page}: {}", script.lines().next().unwrap_or_default());
        self.shell(&script).await.stdout
    }

    /// Repeats a command until it prints these words.
    async fn wait_for(&self, command: &str, words: &str) -> String {
        wait_until(format!("{words:?} from {command}"), PATIENCE, async || {
            let printed = self.shell(&format!("{command} 2>&1 || true")).await.stdout;
            if printed.contains(words) {
                Ok(printed)
            } else {
                Err(printed)
            }
        })
        .await
        .unwrap()
    }

    /// The scripts of all pages that were not run and are not in [`NOT_RUN`].
    fn left_out(&self) -> Vec<String> {
        let entries = fs::read_dir(repository().join("docs/operations")).unwrap();
        let pages = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left_out = Vec::new();
        // docs/operations/README.md is an overview without commands. `path` turns its name into the README.md of the repository,
        // which is checked instead.
        for page in pages {
            for script in scripts(&page) {
                let is_excluded = NOT_RUN
                    .iter()
                    .any(|(of, words, _)| *of == page && script.contains(words));
                assert!(
                    !(is_excluded && self.run.contains(&script)),
                    "run, and in NOT_RUN: {script}"
                );
                if !is_excluded && !self.run.contains(&script) {
                    left_out.push(format!("{page}: {script}"));
                }
            }
        }
        left_out
    }
}

#[tokio::test]
async fn commands_of_the_documents_work_on_two_clusters() {
    let lab = Lab::start(LabPlan::clusters(&[(HUB, 2), (MEMBER, 1)])).await.unwrap();
    let (hub, member) = (lab.cluster(HUB), lab.cluster(MEMBER));
    let images = ProductImages::ensure(&|_| {}).unwrap();
    for (cluster, image) in [
        (&hub, &images.agent),
        (&member, &images.agent),
        (&hub, &images.controller),
    ] {
        cluster.load_image(image).await.unwrap();
    }
    drop(images);
    hub.run_web().await.unwrap();
    let client = &member.run_web().await.unwrap()[0].name;
    let api = |cluster: &clustermesh_lab::Cluster<'_>| format!("https://{}:6443", cluster.plan().api_address());
    let mut operator = Operator::new(&lab).await;

    // A first mesh.
    operator.run("README.md", "crds/peers.kilo", &[]).await;
    operator.run("README.md", "crds/clustermeshes.kilo", &[]).await;
    let server = [("https://tenant-a.example:6443", &*api(&member))];
    operator.run("README.md", "deploy/member-account.yaml", &server).await;
    operator.run("install.md", "--dry-run=client -o yaml", &server).await;
    let (_, mesh) = blocks("README.md")
        .into_iter()
        .find(|(_, text)| text.contains("kind: ClusterMesh"))
        .unwrap();
    fs::write(operator.directory.path().join("mesh.yaml"), mesh).unwrap();
    operator.run("README.md", "apply -f mesh.yaml", &[]).await;
    let printed = operator
        .wait_for("kubectl get clustermesh,peers -A", "True    Meshed   2/2       3 ")
        .await;
    assert!(
        printed.contains("peer.kilo.squat.ai/demo--tenant-a--tenant-a-1 "),
        "{printed}"
    );
    let get = format!("kubectl --context tenant-a exec {client} -- /bin/probe get http://hub-web.default.svc");
    operator.wait_for(&get, "hello from ").await;

    // Status, planning, admission, key change, endpoints, adoption.
    operator
        .wait_for("clustermeshctl status --context mgmt", "healthy for ")
        .await;
    operator
        .run("clustermeshctl.md", "clustermeshctl status --context", &[])
        .await;
    operator.run("clustermeshctl.md", "status --live", &[]).await;
    operator.run("clustermeshctl.md", "clustermeshctl graph", &[]).await;
    operator.run("clustermeshctl.md", "plan -f mesh.yaml", &[]).await;
    operator.run("clustermeshctl.md", "plan --context mgmt", &[]).await;
    operator.run("clustermeshctl.md", "explain node", &[]).await;
    let lease = operator.run("install.md", "get lease", &[]).await;
    assert!(
        lease.contains("clustermesh-controller-"),
        "the Lease has a holder: {lease}"
    );
    operator.run("install.md", "editor deploy/admission.yaml", &[]).await;
    let agent_pod = "kubectl -n clustermesh-agent get pods -o jsonpath='{.items[0].metadata.name}'";
    let agent_pod = operator.shell(agent_pod).await.stdout;
    operator
        .run("key-change.md", "rotate-key", &[("POD ", &format!("{agent_pod} "))])
        .await;
    let endpoint = format!("{}:51820", hub.nodes()[0].address());
    let values = [("NODE", "mgmt-1"), ("HOST:PORT  ", &*format!("{endpoint}  "))];
    operator.run("nat.md", "clustermesh-endpoint", &values).await;
    operator.run("migration.md", "adopt-hub", &[("=ID", "=0")]).await;

    // Sandboxes.
    operator
        .shell("kubectl create namespace team-x; kubectl create namespace tenant-notebooks")
        .await;
    operator.run("sandboxes.md", "crds/sandboxaccesses.kilo", &[]).await;
    operator.run("sandboxes.md", "create rolebinding", &[]).await;
    operator
        .shell("kubectl -n clustermesh-gateway rollout status statefulset/clustermesh-gateway")
        .await;
    let gateways = operator.run("sandboxes.md", "get sandboxgateways", &[]).await;
    assert!(gateways.contains("clustermesh-gateway-0"), "{gateways}");
    operator.run("sandboxes.md", "quarantine=notebooks", &[]).await;
    operator.run("sandboxes.md", "sandbox-networkpolicy.yaml", &[]).await;

    // Troubleshooting.
    let status = operator
        .run("troubleshooting.md", "describe clustermesh demo", &[])
        .await;
    assert!(status.contains("mgmt-1 {\"version\""), "{status}");
    let node_script = operator.script("troubleshooting.md", "wg-agent status", &[]);
    let agent = workspace_program("wg-agent").unwrap();
    let node_script = format!("PATH=$PATH:{}\n{node_script}", agent.parent().unwrap().display());
    let printed = hub.nodes()[0]
        .exec(["bash", "-euc", &node_script])
        .await
        .unwrap()
        .stdout;
    assert!(
        printed.contains("table inet clustermesh") && printed.ends_with("ok\n"),
        "{printed}"
    );
    let metrics = operator.run("metrics.md", "port-forward", &[]).await;
    assert!(metrics.contains("clustermesh_"), "{metrics}");

    // An agent outside the DaemonSet, and an agent on a node of kg. This checks only that the API server accepts their objects and
    // credentials.
    let values = [("NODE=node-1", "NODE=mgmt-1"), ("https://HOST:6443", &*api(&hub))];
    operator.run("install.md", "NODE=node-1", &values).await;
    operator
        .shell("kubectl --kubeconfig wg-agent.kubeconfig get nodes,peers")
        .await;
    operator
        .shell("kubectl label node mgmt-1 kilo-clustermesh.io/wg-agent-")
        .await;
    operator.run("kilo.md", "--mode=policy", &[]).await;

    // Removal.
    operator.run("removal.md", "delete clustermesh demo", &[]).await;
    operator.run("removal.md", "delete peers,peerpolicies", &[]).await;
    operator.run("removal.md", "delete -f deploy/gateway.yaml", &[]).await;
    let cleanup = operator.script("removal.md", "[\"cleanup\"]", &[]);
    let (patch, logs_and_delete) = cleanup.split_once("# within a minute").unwrap();
    operator.shell(patch).await;
    let (_, logs_and_delete) = logs_and_delete.split_once('\n').unwrap();
    let (logs, delete) = logs_and_delete.split_once('\n').unwrap();
    operator
        .wait_for(logs, "nothing of wg-agent is left on this node but its key")
        .await;
    operator.shell(delete).await;

    assert_eq!(operator.left_out(), Vec::<String>::new());
}
