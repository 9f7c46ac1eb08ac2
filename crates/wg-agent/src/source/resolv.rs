//! Reports that a file like `/etc/resolv.conf` changed; [`super::underlay`] reads its content.
//!
//! It polls once a second instead of using inotify. The file may be replaced by a rename, be reached through a symlink
//! that changes, or be bind-mounted into a container, and no single inotify watch detects all three.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf, time::Duration};

use tokio::time::{Interval, MissedTickBehavior, interval};

const PERIOD: Duration = Duration::from_secs(1);

/// Identifies a version of a file: device, inode, length, and modification time in seconds and nanoseconds; `None` = no file.
type Version = Option<(u64, u64, u64, i64, i64)>;

/// Polls one file.
#[derive(Debug)]
pub struct Watch {
    path: PathBuf,
    seen: Version,
    tick: Interval,
}

impl Watch {
    /// Starts from the current file, which need not exist. Must be called inside a tokio runtime.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let mut tick = interval(PERIOD);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            seen: version(&path),
            path,
            tick,
        }
    }

    /// Waits until the file has changed. Safe to cancel.
    pub async fn changed(&mut self) {
        loop {
            self.tick.tick().await;
            let now = version(&self.path);
            if now != self.seen {
                self.seen = now;
                return;
            }
        }
    }
}

fn version(path: &PathBuf) -> Version {
    let found = fs::metadata(path).ok()?;
    Some((
        found.dev(),
        found.ino(),
        found.size(),
        found.mtime(),
        found.mtime_nsec(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a change is reported within an hour of simulated time.
    async fn reports_change(watch: &mut Watch) -> bool {
        tokio::time::timeout(Duration::from_secs(3600), watch.changed())
            .await
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn edited_replaced_or_relinked_file_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut watch = Watch::new(at("resolv.conf"));
        assert!(!reports_change(&mut watch).await);
        fs::write(at("resolv.conf"), "nameserver 192.0.2.1").unwrap();
        assert!(reports_change(&mut watch).await, "created");
        fs::write(at("resolv.conf"), "nameserver 192.0.2.10").unwrap();
        assert!(reports_change(&mut watch).await, "edited");
        fs::write(at("next"), "nameserver 192.0.2.11").unwrap();
        fs::rename(at("next"), at("resolv.conf")).unwrap();
        assert!(reports_change(&mut watch).await, "replaced");
        fs::remove_file(at("resolv.conf")).unwrap();
        assert!(reports_change(&mut watch).await, "removed");
        for name in ["one", "two"] {
            fs::write(at(name), "nameserver 192.0.2.12").unwrap();
            std::os::unix::fs::symlink(at(name), at("link")).unwrap();
            fs::rename(at("link"), at("resolv.conf")).unwrap();
            assert!(reports_change(&mut watch).await, "symlink to {name}");
        }
        assert!(!reports_change(&mut watch).await);
    }
}
