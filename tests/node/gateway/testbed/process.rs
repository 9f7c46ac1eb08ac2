//! Runs the gateway's process with exactly the privileges of its pod, and with the environment variables that the pod sets.

use std::{
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use clustermesh_agent_core::numbers::NFT_TABLE;
use clustermesh_lab::wait_until;
use clustermesh_tests::{
    agent::{AS_AGENT, agent_program},
    netns::Running,
    traffic::packets,
};

use super::{GATEWAY_POD, NAME, NAMESPACE, NODE, TIMEOUT, Testbed};

impl Testbed {
    /// Starts the gateway with additional arguments.
    pub(crate) fn gateway(&self, extra_args: &[&str]) -> Gateway {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let log = self.file(&format!("log-{number}"));
        let file = std::fs::File::create(&log).expect("a log");
        let [unshare, privileges @ ..] = AS_AGENT;
        let mut command = Command::new(unshare);
        command.args(privileges).args([agent_program(), "--mode=gateway"]);
        command.arg(format!("--backend={}", super::backend()));
        command.arg(format!("--interface={}", self.interface));
        command.arg(format!("--kubeconfig={}", self.file("kubeconfig").display()));
        command.arg(format!("--key-file={}", self.file("key").display()));
        command.args([
            "--gateway-cidr=100.66.255.0/28,fd00:66:255::/64",
            "--endpoint-network=10.10.0.0/16,fd00:10::/32",
        ]);
        command.args(extra_args);
        command.env("PATH", self.path_with_nft_wrapper());
        let variables = [
            ("POD_NAME", NAME.to_owned()),
            ("POD_NAMESPACE", NAMESPACE.to_owned()),
            ("POD_UID", self.pod_uid.clone()),
            ("POD_IPS", GATEWAY_POD.join(",")),
            ("NODE_IPS", NODE.to_owned()),
        ];
        command.envs(variables);
        command
            .stdin(Stdio::null())
            .stderr(file.try_clone().expect("a log"))
            .stdout(file);
        Gateway {
            running: self.gateway_pod.spawn_command(&mut command),
            log,
        }
    }

    /// Returns a PATH with a wrapper around nft. While there is no table, the wrapper delays each write by a second, as a loaded node
    /// may. It limits nft's address space to 100 MB, because nft and the gateway share the container's 256 MiB.
    fn path_with_nft_wrapper(&self) -> String {
        let (directory, path) = (self.file("bin"), std::env::var("PATH").expect("PATH"));
        let program = format!(
            "#!/bin/sh\nPATH={path}\nulimit -v 100000\nif [ \"$1\" = -f ] && ! nft list table inet {NFT_TABLE} >/dev/null 2>&1; then sleep 1; fi\n\
             exec nft \"$@\"\n"
        );
        std::fs::create_dir_all(&directory).expect("make a directory");
        std::fs::write(directory.join("nft"), program).expect("write a program");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.join("nft"), executable).expect("make it executable");
        format!("{}:{path}", directory.display())
    }

    /// Packets that a rule of the gateway's table has dropped; `comment` is the start of its comment.
    pub(crate) fn dropped(&self, chain: &str, comment: &str) -> u64 {
        let text = self
            .gateway_pod
            .run("nft", &["list", "chain", "inet", NFT_TABLE, chain]);
        let comment = format!("comment \"{comment}");
        let rule = text.lines().find(|rule| rule.contains(&comment));
        let rule = rule.unwrap_or_else(|| panic!("no rule with {comment}: {text}"));
        packets(rule)
    }

    pub(crate) async fn wait_until_ready(&self) {
        wait_until("the gateway to be ready", TIMEOUT, async || match self.readyz() {
            (code, _) if code == "200" => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }

    /// The status code and text of `/readyz`.
    pub(crate) fn readyz(&self) -> (String, String) {
        let args = ["-sS", "-m", "2", "-w", "\n%{http_code}", "http://127.0.0.1:9587/readyz"];
        let output = self.gateway_pod.output("curl", &args);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (text, code) = text.rsplit_once('\n').unwrap_or(("", ""));
        (code.to_owned(), text.to_owned())
    }
}

/// A running gateway. In a failing test its log is printed.
pub(crate) struct Gateway {
    pub(crate) running: Running,
    pub(crate) log: PathBuf,
}

impl Gateway {
    /// VmRSS of the process, in kB.
    pub(crate) fn resident_kilobytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.running.pid())).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.expect("a number")
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if thread::panicking() {
            println!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}
