//! How a virtual machine ends: at its time limit, and with its owner when that is killed.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
/// Anything that takes longer is broken, or the kernel has to be fetched first.
const SOON: Duration = Duration::from_secs(120);

fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(value) = ask() {
            return value;
        }
        assert!(Instant::now() < until, "waited {SOON:?} for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The emulator that this process has started, and the directory of its run.
fn emulator(owner: u32) -> Option<(u32, PathBuf)> {
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find_map(|pid| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        if parent.trim().parse::<u32>().ok()? != owner {
            return None;
        }
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).into_owned();
        let share = line.split('\0').find(|word| word.contains("mount_tag=run"))?;
        let path = share.split(',').find_map(|part| part.strip_prefix("path="))?;
        // Not the program that becomes it.
        line.starts_with("qemu").then(|| (pid, path.into()))
    })
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_machine_ends_at_its_limit_and_with_its_owner_and_the_next_run_takes_away_what_a_dead_one_left() {
    let vm = |limit: &str| {
        let mut command = Command::new(XTASK);
        command
            .args(["vm", "--limit", limit, "--", "sleep", "1000"])
            .stdin(Stdio::null());
        command
    };
    let mut owner = Killed(vm("600").spawn().expect("start it"));
    let (pid, directory) = wait_for("the emulator", || emulator(owner.0.id()));
    assert!(directory.join("command").exists());
    owner.0.kill().expect("kill its owner");
    owner.0.wait().expect("wait for it");
    // A zombie that its new parent has not fetched yet does nothing any more.
    let gone = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    };
    wait_for("the emulator to end with its owner", gone);

    let output = vm("1").output().expect("run it");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(124), "{said}");
    assert!(said.contains("vm: ended after the limit of 1 s (--limit)"), "{said}");
    assert!(
        !Path::new(&directory).exists(),
        "{} is still there",
        directory.display()
    );
}
