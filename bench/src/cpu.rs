//! Reads CPU time and memory from /proc. The kernel counts CPU time in ticks of 10 ms.

use std::fs;

use anyhow::Context;

/// `USER_HZ`, which is 100 on every Linux that Rust's standard library runs on (time(7)).
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU seconds used so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cpu {
    /// CPU seconds of the whole machine.
    pub(crate) machine: f64,
    /// CPU seconds of the given daemons, in user and kernel mode.
    pub(crate) daemons: f64,
}

impl Cpu {
    /// Reads the CPU time of the machine and of the daemons with these pids.
    pub(crate) fn now(daemons: &[u32]) -> anyhow::Result<Self> {
        let stat = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
        let machine = busy_ticks(&stat).context("/proc/stat has another format")?;
        let mut ticks = 0;
        for pid in daemons {
            let path = format!("/proc/{pid}/stat");
            let stat = fs::read_to_string(&path).with_context(|| format!("read {path}: has the program ended?"))?;
            ticks += process_ticks(&stat).with_context(|| format!("{path} has another format"))?;
        }
        Ok(Self {
            machine: machine as f64 / TICKS_PER_SECOND,
            daemons: ticks as f64 / TICKS_PER_SECOND,
        })
    }

    /// CPU seconds used since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            machine: self.machine - earlier.machine,
            daemons: self.daemons - earlier.daemons,
        }
    }
}

/// Resident memory of a process in bytes (`VmRSS`, proc_pid_status(5)).
pub(crate) fn resident(pid: u32) -> anyhow::Result<u64> {
    memory(pid, "VmRSS:")
}

/// The highest resident memory of a process so far in bytes (`VmHWM`).
pub(crate) fn peak_resident(pid: u32) -> anyhow::Result<u64> {
    memory(pid, "VmHWM:")
}

fn memory(pid: u32, field: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("read {path}: has the program ended?"))?;
    kilobytes(&status, field)
        .map(|kilobytes| kilobytes * 1024)
        .with_context(|| format!("{path} has no {field}"))
}

/// user + nice + system + irq + softirq + steal of the line `cpu` (proc_stat(5)), without idle and iowait. user already contains guest.
fn busy_ticks(stat: &str) -> Option<u64> {
    let words = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let ticks: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    [0, 1, 2, 5, 6, 7].iter().map(|index| ticks.get(*index).copied()).sum()
}

/// utime + stime, fields 14 and 15 (proc_pid_stat(5)). The words are split after field 2, the program's name, which may contain spaces and
/// brackets: index 11 is field 14.
fn process_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    Some(words.get(11)?.parse::<u64>().ok()? + words.get(12)?.parse::<u64>().ok()?)
}

fn kilobytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed_as_documented() {
        assert_eq!(
            busy_ticks("cpu  10 20 30 4000 5000 1 2 3 900 900\ncpu0 1 1 1 1\n"),
            Some(10 + 20 + 30 + 1 + 2 + 3)
        );
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 0 0 77 23 5 6 20 0 9 0 1 2 3";
        assert_eq!(process_ticks(stat), Some(100));
        assert_eq!(kilobytes("Name:\tx\nVmRSS:\t    1234 kB\n", "VmRSS:"), Some(1234));
    }
}
