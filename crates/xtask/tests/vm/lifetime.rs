//! Tests that a virtual machine is stopped at its time limit, and when its owner (`cargo xtask vm`) is killed.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
/// Time limit of one wait, long enough for a download of the kernel.
const TIMEOUT: Duration = Duration::from_secs(120);

fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < until, "waited {TIMEOUT:?} for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The emulator that the process `owner` has started, and the directory of its run.
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
        // Before the process executes QEMU, it runs `setpriv`, with the same arguments.
        line.starts_with("qemu").then(|| (pid, path.into()))
    })
}

/// Kills the process when dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn machine_stops_with_its_owner_or_at_limit_and_is_cleaned_up() {
    let vm = |limit: &str| {
        let mut command = Command::new(XTASK);
        command
            .args(["vm", "--limit", limit, "--", "sleep", "1000"])
            .stdin(Stdio::null());
        command
    };
    let mut owner = KillOnDrop(vm("600").spawn().expect("start the machine"));
    let (pid, first_directory) = wait_for("the emulator", || emulator(owner.0.id()));
    assert!(first_directory.join("command").exists());
    owner.0.kill().expect("kill its owner");
    owner.0.wait().expect("wait for its owner");
    // A zombie counts as exited: its new parent may not have waited for it yet.
    let has_exited = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z ")).then_some(())
    };
    wait_for("the emulator to exit with its owner", has_exited);

    let output = vm("1").output().expect("run the machine");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(124), "{stderr}");
    assert!(
        stderr.contains("vm: stopped at the time limit of 1 s (--limit)"),
        "{stderr}"
    );
    // The start of the second machine has removed the directory of the first, whose owner was killed.
    assert!(!first_directory.exists(), "{} still exists", first_directory.display());
}
