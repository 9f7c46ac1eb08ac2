//! Tells that a file like `/etc/resolv.conf` is another one; what it says is read in [`super::underlay`].
//!
//! By looking, once a second, and not by inotify: the file is replaced by a rename, reached through a symlink that changes, or
//! bound into a container, and each of the three escapes a watch on one of the others.

use std::{fs, os::unix::fs::MetadataExt, path::PathBuf, time::Duration};

use tokio::time::{Interval, MissedTickBehavior, interval};

const PERIOD: Duration = Duration::from_secs(1);

/// What tells two versions of a file apart: device, inode, length, and its modification time in seconds and nanoseconds.
type Version = Option<(u64, u64, u64, i64, i64)>;

/// Looks at one file.
#[derive(Debug)]
pub struct Watch {
    path: PathBuf,
    seen: Version,
    tick: Interval,
}

impl Watch {
    /// Starts from the file as it is now; it need not exist. Must be called inside a tokio runtime.
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

    /// Waits until the file is another one. Safe to cancel.
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

    /// With the clock paused: a wait that ends before an hour has passed was ended by the file.
    async fn changes(watch: &mut Watch) -> bool {
        tokio::time::timeout(Duration::from_secs(3600), watch.changed())
            .await
            .is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_edited_replaced_or_reached_by_another_link_is_noticed_and_one_that_stays_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut watch = Watch::new(at("resolv.conf"));
        assert!(!changes(&mut watch).await);
        fs::write(at("resolv.conf"), "nameserver 192.0.2.1").unwrap();
        assert!(changes(&mut watch).await, "made");
        fs::write(at("resolv.conf"), "nameserver 192.0.2.10").unwrap();
        assert!(changes(&mut watch).await, "edited");
        fs::write(at("next"), "nameserver 192.0.2.11").unwrap();
        fs::rename(at("next"), at("resolv.conf")).unwrap();
        assert!(changes(&mut watch).await, "replaced");
        fs::remove_file(at("resolv.conf")).unwrap();
        assert!(changes(&mut watch).await, "taken away");
        for name in ["one", "two"] {
            fs::write(at(name), "nameserver 192.0.2.12").unwrap();
            std::os::unix::fs::symlink(at(name), at("link")).unwrap();
            fs::rename(at("link"), at("resolv.conf")).unwrap();
            assert!(changes(&mut watch).await, "led to {name}");
        }
        assert!(!changes(&mut watch).await);
    }
}
