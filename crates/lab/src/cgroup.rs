//! Manages the cgroups of a lab: `clustermesh-lab/<run>/<node>` in every hierarchy, for cgroup versions 1 and 2.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

const ROOT: &str = "/sys/fs/cgroup";
const LAB_CGROUP: &str = "clustermesh-lab";

/// How the host mounts cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cgroups {
    /// The mounted hierarchies.
    V1(Vec<Hierarchy>),
    /// The one unified hierarchy.
    V2,
}

/// A version 1 hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hierarchy {
    /// The mount point.
    pub(crate) mount: PathBuf,
    /// The mount option that selects the hierarchy: its controllers (`cpu,cpuacct`, `memory`), or `name=systemd`.
    pub(crate) option: String,
}

impl Cgroups {
    pub(crate) fn detect() -> Result<Self> {
        if statfs(ROOT)
            .with_context(|| format!("{ROOT} is not mounted"))?
            .filesystem_type()
            == CGROUP2_SUPER_MAGIC
        {
            return Ok(Self::V2);
        }
        let hierarchies = parse_v1(&std::fs::read_to_string("/proc/self/mountinfo")?);
        anyhow::ensure!(!hierarchies.is_empty(), "no cgroup hierarchy is mounted under {ROOT}");
        Ok(Self::V1(hierarchies))
    }

    /// The cgroup of a whole lab (`node` = `None`) or of one of its nodes.
    pub(crate) fn of(&self, run: &Path, node: Option<&str>) -> Cgroup {
        let relative = Path::new(LAB_CGROUP)
            .join(run.file_name().unwrap_or_default())
            .join(node.unwrap_or_default());
        let directories = match self {
            Self::V1(hierarchies) => hierarchies
                .iter()
                .map(|hierarchy| hierarchy.mount.join(&relative))
                .collect(),
            Self::V2 => vec![Path::new(ROOT).join(&relative)],
        };
        Cgroup {
            directories,
            unified: *self == Self::V2,
        }
    }
}

/// One cgroup in all hierarchies. It need not exist yet.
pub(crate) struct Cgroup {
    directories: Vec<PathBuf>,
    unified: bool,
}

impl Cgroup {
    /// Creates the cgroup and moves the calling process into it.
    pub(crate) fn join(&self) -> Result<()> {
        for directory in &self.directories {
            make(directory, self.unified)?;
            let file = directory.join("cgroup.procs");
            std::fs::write(&file, "0").with_context(|| format!("join {}", file.display()))?;
        }
        Ok(())
    }

    /// Whether no process is in this cgroup or below it.
    pub(crate) fn is_empty(&self) -> bool {
        self.directories.iter().all(|directory| {
            subtree(directory).iter().all(|cgroup| {
                std::fs::read_to_string(cgroup.join("cgroup.procs"))
                    .unwrap_or_default()
                    .trim()
                    .is_empty()
            })
        })
    }

    /// The processes in this cgroup and below it.
    pub(crate) fn pids(&self) -> Vec<i32> {
        // `join` moves a process into this cgroup in every hierarchy, so reading one is enough.
        let directories = self
            .directories
            .first()
            .map(|directory| subtree(directory))
            .unwrap_or_default();
        let read = |directory: PathBuf| std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
        directories
            .into_iter()
            .map(read)
            .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>())
            .collect()
    }

    /// Removes this cgroup and all cgroups below it. A missing cgroup is no error.
    pub(crate) fn remove(&self) -> Result<()> {
        for directory in self.directories.iter().flat_map(|directory| subtree(directory)) {
            std::fs::remove_dir(&directory).with_context(|| format!("remove {}", directory.display()))?;
        }
        Ok(())
    }
}

/// `directory` and every cgroup below it, deepest first.
fn subtree(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return vec![];
    };
    let children = entries
        .filter_map(|entry| entry.ok())
        .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()));
    let mut all: Vec<_> = children.flat_map(|entry| subtree(&entry.path())).collect();
    all.push(directory.into());
    all
}

fn make(directory: &Path, unified: bool) -> Result<()> {
    let mut made = PathBuf::new();
    for part in directory.components() {
        made.push(part);
        if !made.starts_with(ROOT) || made.as_os_str() == ROOT {
            continue;
        }
        if !made.exists() {
            match std::fs::create_dir(&made) {
                // Another lab may create the shared parent at the same moment.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                other => other.with_context(|| format!("make the cgroup {}", made.display()))?,
            }
        }
        if unified {
            // A cgroup that enables controllers for its children cannot contain processes itself.
            if made != *directory {
                enable_controllers(&made)?;
            }
        } else if made.join("cpuset.cpus").exists() {
            // A new cpuset has no CPUs, and an empty cpuset accepts no process.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if std::fs::read_to_string(made.join(file))?.trim().is_empty() {
                    let parent = made.parent().unwrap_or(&made).join(file);
                    std::fs::write(made.join(file), std::fs::read(&parent)?)
                        .with_context(|| format!("write {}", made.join(file).display()))?;
                }
            }
        }
    }
    Ok(())
}

/// Cgroup version 2: enables every controller of `directory` for its children.
pub(crate) fn enable_controllers(directory: &Path) -> Result<()> {
    let controllers = std::fs::read_to_string(directory.join("cgroup.controllers"))?;
    for controller in controllers.split_whitespace() {
        // One write for each controller, so that one that cannot be delegated does not block the others.
        let _ = std::fs::write(directory.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    Ok(())
}

fn parse_v1(mountinfo: &str) -> Vec<Hierarchy> {
    let hierarchy = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        if right.next()? != "cgroup" {
            return None;
        }
        let option = right.nth(1)?;
        let option: Vec<_> = option
            .split(',')
            .filter(|word| !["rw", "ro", "xattr", "noprefix"].contains(word))
            .collect();
        let option: Vec<_> = option
            .into_iter()
            .filter(|word| !word.starts_with("release_agent"))
            .collect();
        let mount = PathBuf::from(left.split(' ').nth(4)?);
        (!option.is_empty() && mount.starts_with(ROOT)).then(|| Hierarchy {
            mount,
            option: option.join(","),
        })
    };
    mountinfo.lines().filter_map(hierarchy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_1_hierarchies_are_read_with_their_mount_options() {
        let text = "30 24 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n\
            32 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd\n";
        let hierarchy = |mount: &str, option: &str| Hierarchy {
            mount: mount.into(),
            option: option.into(),
        };
        assert_eq!(
            parse_v1(text),
            [
                hierarchy("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"),
                hierarchy("/sys/fs/cgroup/systemd", "name=systemd")
            ]
        );
    }
}
