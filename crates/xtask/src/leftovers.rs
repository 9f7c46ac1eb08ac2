//! Finds leftovers of tests on this machine, by comparing its state before and after the tests.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

/// How long a killed program and its network namespace may take to disappear.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Files, links, nftables tables, routing rules, cgroups, mounts and processes of this machine, each as its kind and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MachineState(BTreeSet<String>);

impl MachineState {
    /// Reads the current state. It contains only those processes that run a program from these directories.
    pub(crate) fn read(program_directories: &[PathBuf]) -> anyhow::Result<Self> {
        let mut all = BTreeSet::new();
        let mut add = |kind: &str, names: Vec<String>| all.extend(names.iter().map(|name| format!("{kind} {name}")));
        for directory in ["/var/run/wireguard", "/run/netns", "/run/clustermesh-lab"] {
            add("the file", paths(Path::new(directory), ""));
        }
        // The crate tempfile creates files and directories whose names begin with `.tmp`.
        add("the file", paths(&std::env::temp_dir(), ".tmp"));
        add("the link", names(Path::new("/sys/class/net")));
        add("the nftables", lines("nft", &["list", "tables"])?);
        add("the IPv4 rule", lines("ip", &["-4", "rule", "show"])?);
        add("the IPv6 rule", lines("ip", &["-6", "rule", "show"])?);
        add("the cgroup", cgroups());
        add("the mount on", mounts()?);
        add("the process", processes(program_directories));
        Ok(Self(all))
    }

    /// Everything that did not exist in this earlier state. Waits up to [`TIMEOUT`] until it disappears.
    pub(crate) fn left_since(&self, program_directories: &[PathBuf]) -> anyhow::Result<Vec<String>> {
        let start = Instant::now();
        loop {
            let left = Self::read(program_directories)?.without(self);
            if left.is_empty() || start.elapsed() > TIMEOUT {
                return Ok(left);
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    fn without(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// The names in a directory; empty if it does not exist.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The paths of the entries of a directory whose names begin with `start`.
fn paths(directory: &Path, start: &str) -> Vec<String> {
    let names = names(directory).into_iter().filter(|name| name.starts_with(start));
    names.map(|name| directory.join(name).display().to_string()).collect()
}

fn lines(program: &str, words: &[&str]) -> anyhow::Result<Vec<String>> {
    let output = Command::new(program).args(words).output();
    let output = output.with_context(|| format!("{program} cannot be started"))?;
    if !output.status.success() {
        bail!(
            "{program} {words:?} failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect())
}

/// The cgroups of labs, in every hierarchy of cgroup version 1, or in the only one of version 2.
fn cgroups() -> Vec<String> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = names(root).into_iter().map(|name| root.join(name));
    let all = hierarchies.chain([root.to_owned()]);
    all.flat_map(|hierarchy| paths(&hierarchy.join("clustermesh-lab"), ""))
        .filter(|path| Path::new(path).is_dir())
        .collect()
}

fn mounts() -> anyhow::Result<Vec<String>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("read the mounts")?;
    Ok(text
        .lines()
        .filter_map(|line| line.split(' ').nth(4).map(str::to_owned))
        .collect())
}

/// Processes that run a program from these directories, as `PID: path`.
fn processes(program_directories: &[PathBuf]) -> Vec<String> {
    let running = |number: &String| fs::read_link(Path::new("/proc").join(number).join("exe")).ok();
    let all = names(Path::new("/proc")).into_iter();
    let all = all.filter_map(|number| running(&number).map(|path| (number, path)));
    all.filter(|(_, path)| program_directories.iter().any(|directory| path.starts_with(directory)))
        .map(|(number, path)| format!("{number}: {}", path.display()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_new_entries_are_leftovers() {
        let machine = |all: &[&str]| MachineState(all.iter().map(|&one| one.to_owned()).collect());
        let before = machine(&["the link eth0", "the mount on /run"]);
        assert_eq!(before.without(&before), [""; 0]);
        let after = machine(&["the link eth0", "the link wg0"]);
        assert_eq!(after.without(&before), ["the link wg0"]);
    }

    #[test]
    fn files_processes_and_mounts_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let _socket = UnixListener::bind(directory.path().join("wg0.sock")).expect("a socket");
        let socket = directory.path().join("wg0.sock").display().to_string();
        assert_eq!(paths(directory.path(), ""), [socket]);
        assert_eq!(paths(directory.path(), "."), [""; 0]);
        assert_eq!(paths(&directory.path().join("none"), ""), [""; 0]);

        let program = std::env::current_exe().expect("this program");
        let itself = format!("{}: {}", std::process::id(), program.display());
        assert!(processes(std::slice::from_ref(&program)).contains(&itself));
        assert_eq!(processes(&[directory.path().to_owned()]), [""; 0]);

        assert!(mounts().expect("mounts").contains(&"/proc".to_owned()));
    }
}
