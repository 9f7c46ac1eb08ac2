//! Test steps that run `clustermeshctl status` and `graph`, for a test in which a member becomes unreachable.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use clustermesh_lab::{NAMESPACE, wait_until};
use clustermesh_tests::{
    program,
    test_env::{SOON, TestEnv},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::operator::{self, clustermeshctl};

/// The name of the controller's Lease.
const LEASE: &str = "clustermesh-controller";

/// `clustermeshctl` with a kubeconfig of the hub.
pub(crate) struct StatusCommand<'e> {
    env: &'e TestEnv,
    flags: Vec<String>,
}

impl<'e> StatusCommand<'e> {
    /// `clusters` get a context in the kubeconfig.
    pub(crate) fn new(env: &'e TestEnv, clusters: &[&str]) -> Self {
        Self {
            env,
            flags: operator::flags(env, clusters),
        }
    }

    async fn run(&self, words: &[&str]) -> (String, String, String) {
        clustermeshctl(words, &self.flags).await
    }

    pub(crate) async fn assert_healthy(&self) {
        let (code, out, err) = self.run(&["status"]).await;
        assert_eq!((&*code, &*err), ("0", ""), "{out}");
        let [line] = &*out.lines().collect::<Vec<_>>() else {
            panic!("{out}")
        };
        assert!(line.starts_with("clustermesh/prod: healthy for "), "{out}");
        assert!(line.contains("; 3/3 members reachable, "), "{out}");
    }

    /// Checks that `status` and `graph` name a member whose API server does not answer. Returns the time since which it does not
    /// answer, as `status` prints it.
    pub(crate) async fn names_unreachable(&self, member: &str) -> String {
        let (code, out, err) = self.run(&["status"]).await;
        assert_eq!((&*code, &*err), ("1", ""), "{out}");
        let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
        let [summary, problem, remedy] = [
            "clustermesh/prod: down for ".to_owned(),
            format!("clustermesh/prod {member}: MemberStale: its API server does not answer"),
            format!("-> does {member} run? Its address is in Secret {NAMESPACE}/{member}-kubeconfig"),
        ];
        assert!(
            text.starts_with(&summary) && text.contains("; 2/3 members reachable, "),
            "{out}"
        );
        assert!(text.contains(&problem) && text.contains(&remedy), "{out}");
        assert!(out.lines().count() <= 10, "{out}");

        let (code, out, err) = self.run(&["status", "--output=json"]).await;
        assert_eq!((&*code, &*err), ("1", ""), "{out}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let [problem] = &**report["problems"].as_array().unwrap() else {
            panic!("{out}")
        };
        let fields =
            ["severity", "mesh", "cluster", "condition", "reason"].map(|field| problem[field].as_str().unwrap());
        assert_eq!(fields, ["down", "clustermesh/prod", member, "Ready", "MemberStale"]);

        let (code, out, err) = self.run(&["graph"]).await;
        assert_eq!((&*code, &*err), ("0", ""), "{out}");
        let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.starts_with("3 members, 3 links: 2 unknown, 1 up "), "{out}");
        assert!(text.contains("API server not reachable for "), "{out}");
        let (code, svg, err) = self.run(&["graph", "--output=svg"]).await;
        assert_eq!((&*code, &*err), ("0", ""), "{svg}");
        assert!(
            svg.starts_with("<svg ") && svg.contains("API server not reachable for "),
            "{svg}"
        );
        problem["since"].as_str().unwrap().to_owned()
    }

    /// Waits until the status of the mesh counts this number of registered nodes.
    pub(crate) async fn until_registered(&self, nodes: i64) {
        wait_until(format!("{nodes} registered nodes"), SOON, async || {
            let registered = self.env.get_mesh().await.unwrap().status.unwrap().registered_peers;
            if registered == Some(nodes) {
                Ok(())
            } else {
                Err(format!("{registered:?}"))
            }
        })
        .await
        .unwrap();
    }

    pub(crate) async fn error_says_what_is_missing_or_which_flag_is_invalid(&self) {
        let not_a_hub = [self.flags[0].clone(), "--context=tenant-a".to_owned()];
        for (words, flags, why) in [
            (&["status"][..], &not_a_hub[..], "no CRD clustermeshes.kilo.squat.ai"),
            (&["graph"], &not_a_hub, "no CRD clustermeshes.kilo.squat.ai"),
            (
                &["status", "--namespace=empty"],
                &self.flags,
                "no ClusterMesh in namespace empty",
            ),
            (&["status", "--output=svg"], &self.flags, "invalid value 'svg'"),
        ] {
            let (code, out, err) = clustermeshctl(words, flags).await;
            assert_eq!((&*code, &*out), ("2", ""), "{err}");
            assert!(err.contains(why), "{err}");
        }
    }

    /// Checks that the rights that docs/operations/clustermeshctl.md names are enough for an account, and that it gets an error
    /// without them.
    pub(crate) async fn needs_only_the_documented_rights(&self) {
        let kubeconfig = self.env.lab.directory().join("limited.kubeconfig");
        let flags = [
            format!("--kubeconfig={}", kubeconfig.display()),
            "--context=mgmt".to_owned(),
        ];
        let own = self.flags[0].strip_prefix("--kubeconfig=").unwrap();
        let mut limited: Value = serde_json::from_str(&std::fs::read_to_string(own).unwrap()).unwrap();
        for user in limited["users"].as_array_mut().unwrap() {
            user["user"]["as"] = json!("limited");
        }
        std::fs::write(&kubeconfig, limited.to_string()).unwrap();
        let (code, _, err) = clustermeshctl(&["status"], &flags).await;
        assert_eq!(code, "2", "{err}");
        assert!(err.contains("(403): use an account with this permission"), "{err}");

        let kind = |kind: &str| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": "limited"}});
        let (mut role, mut binding) = (kind("ClusterRole"), kind("ClusterRoleBinding"));
        role["rules"] = json!([{"apiGroups": ["kilo.squat.ai"], "resources": ["clustermeshes"], "verbs": ["list"]}]);
        binding["roleRef"] = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "limited"});
        binding["subjects"] = json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "limited"}]);
        for object in [role, binding] {
            self.env.hub().apply(&object.to_string()).await.unwrap();
        }
        wait_until("the account to have its rights", SOON, async || {
            match clustermeshctl(&["status"], &flags).await {
                (code, out, err) if code == "0" && err.is_empty() => Ok(out),
                other => Err(format!("{other:?}")),
            }
        })
        .await
        .unwrap();
        let (code, out, err) = clustermeshctl(&["graph"], &flags).await;
        assert_eq!((&*code, &*err), ("0", ""), "{out}");
    }

    /// Uses Leases in namespaces in which no controller runs.
    pub(crate) async fn names_controller_that_does_not_renew(&self) {
        let write_lease = async |namespace: &str, renewed: String| {
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE, "namespace": namespace},
                "spec": {"holderIdentity": "replica-1", "renewTime": renewed, "leaseDurationSeconds": 3},
            });
            self.env.hub().apply(&lease.to_string()).await.unwrap();
        };
        let status = async |namespace: &str| {
            let flag = format!("--controller-namespace={namespace}");
            self.run(&["status", &flag, "--output=json"]).await
        };
        let old = |second: u8| format!("2020-01-01T00:00:{second:02}.000000Z");
        write_lease("default", old(0)).await;
        write_lease("kube-public", old(0)).await;
        // Nothing renews the first Lease. The leader of the second one renews it; only its clock is wrong.
        let renew = async {
            for second in 1.. {
                write_lease("kube-public", old(second % 60)).await;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let both = async { tokio::join!(status("default"), status("kube-public")) };
        let (expired, renewed) = tokio::select! {
            both = both => both,
            () = renew => unreachable!(),
        };
        let (code, out, err) = expired;
        assert_eq!((&*code, &*err), ("1", ""), "{out}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            report["controller"],
            json!({"holder": "replica-1", "renewed": "2020-01-01T00:00:00Z", "alive": false})
        );
        let problem = &report["problems"][0];
        assert_eq!(
            (&problem["reason"], &problem["since"]),
            (&json!("NoController"), &report["controller"]["renewed"])
        );
        let (code, out, err) = renewed;
        assert_eq!((&*code, &*err), ("0", ""), "{out}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (&report["healthy"], &report["controller"]["alive"]),
            (&json!(true), &json!(true)),
            "{out}"
        );
    }

    /// Starts `clustermeshctl status --watch`.
    pub(crate) fn watch(&self) -> Watch {
        let path = self.env.lab.directory().join("watch.out");
        let out = std::fs::File::create(&path).unwrap();
        let child = Command::new(program("clustermeshctl"))
            .args(["status", "--watch"])
            .args(&self.flags)
            .stdin(Stdio::null())
            .stdout(out)
            .spawn()
            .unwrap();
        Watch { child, path }
    }
}

/// A running `clustermeshctl status --watch`.
pub(crate) struct Watch {
    child: Child,
    path: std::path::PathBuf,
}

impl Watch {
    /// Waits until the output has this text, with spaces in place of line breaks.
    pub(crate) async fn until_shown(&mut self, text: &str) {
        wait_until(format!("the output {text:?}"), SOON, async || {
            let out = std::fs::read_to_string(&self.path).unwrap();
            let words = out.split_whitespace().collect::<Vec<_>>().join(" ");
            if words.contains(text) { Ok(()) } else { Err(out) }
        })
        .await
        .unwrap();
    }

    /// Sends what Ctrl-C sends, and checks the exit code.
    pub(crate) async fn interrupt(&mut self, code: i32) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(pid, Signal::SIGINT).unwrap();
        let exited = wait_until("the program to end", SOON, async || {
            match self.child.try_wait().unwrap() {
                Some(status) => Ok(format!("{:?}", status.code())),
                None => Err("it runs".to_owned()),
            }
        });
        assert_eq!(exited.await.unwrap(), format!("{:?}", Some(code)));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}
