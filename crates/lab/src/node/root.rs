//! Creates the root file system of a node: an overlay over the host's root that keeps writes in memory, with its own /proc, /sys and
//! cgroups. It shares /dev, the run directory and the directories of programs with the host. Sets the sysctls that Kubernetes
//! requires.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};

use super::Settings;
use crate::cgroup::{Cgroups, enable_controllers};

const NONE: Option<&str> = None;

pub(super) fn enter(settings: &Settings) -> Result<()> {
    let cgroups = Cgroups::detect()?;
    let base = settings.directory().join("root");
    fs::create_dir_all(&base)?;
    // This process has a private mount namespace, so the host's processes do not see its mounts.
    mount_filesystem("tmpfs", &base, "mode=755,size=6g")?;
    let [upper, work, root] = ["upper", "work", "root"].map(|name| base.join(name));
    for directory in [&upper, &work, &root] {
        fs::create_dir(directory)?;
    }
    let layers = format!("lowerdir=/,upperdir={},workdir={}", upper.display(), work.display());
    mount_filesystem("overlay", &root, &layers)?;
    mount_filesystem("proc", &root.join("proc"), "")?;
    mount_filesystem("sysfs", &root.join("sys"), "")?;
    bind(Path::new("/dev"), &root.join("dev"), MsFlags::MS_REC)?;
    mount_cgroups(&cgroups, &root.join("sys/fs/cgroup"))?;
    for name in ["run", "tmp", "var/lib", "var/log"] {
        let target = root.join(name);
        fs::create_dir_all(&target)?;
        mount_filesystem("tmpfs", &target, if name == "tmp" { "mode=1777" } else { "mode=755" })?;
    }
    fs::create_dir(root.join("run/netns"))?;
    // The overlay contains only the host's root file system. The directories of programs and the run directory may be on other file
    // systems, so they are bind-mounted.
    for outside in settings.programs.iter().chain([&settings.run]) {
        let inside = under(&root, outside);
        fs::create_dir_all(&inside)?;
        bind(outside, &inside, MsFlags::empty())?;
    }
    let old = root.join(".old");
    fs::create_dir_all(&old)?;
    pivot_root(&root, &old).context("pivot_root")?;
    chdir("/")?;
    umount2("/.old", MntFlags::MNT_DETACH).context("unmount the host's root")?;
    let _ = fs::remove_dir("/.old");
    // kubelet and containerd need mounts to propagate into pods.
    mount(NONE, "/", NONE, MsFlags::MS_SHARED | MsFlags::MS_REC, NONE).context("share /")?;
    if cgroups == Cgroups::V2 {
        // In cgroup version 2, a cgroup that enables controllers for its children must not contain processes. So this process
        // moves into a child before it enables the controllers.
        let top = Path::new("/sys/fs/cgroup");
        fs::create_dir(top.join("init"))?;
        fs::write(top.join("init/cgroup.procs"), "0")?;
        enable_controllers(top)?;
    }
    fs::write("/proc/sys/kernel/hostname", &settings.name).context("set the host name")?;
    sysctls(settings.pod_cidrs.iter().any(|range| range.addr().is_ipv6()))
}

fn mount_cgroups(cgroups: &Cgroups, target: &Path) -> Result<()> {
    let Cgroups::V1(hierarchies) = cgroups else {
        return mount_filesystem("cgroup2", target, "");
    };
    mount_filesystem("tmpfs", target, "mode=755")?;
    for hierarchy in hierarchies {
        let target = target.join(hierarchy.mount.file_name().unwrap_or_default());
        fs::create_dir(&target)?;
        let option = &hierarchy.option;
        let option = if option.starts_with("name=") {
            format!("none,{option}")
        } else {
            option.clone()
        };
        mount_filesystem("cgroup", &target, &option)?;
    }
    Ok(())
}

/// The sysctls that kubelet sets if they differ from the values here. They have no namespace, so kubelet would change the host's
/// values, or exit if it cannot write them. So [`sysctls`] bind-mounts files with these values over them.
const GLOBAL_SYSCTLS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

fn sysctls(has_v6: bool) -> Result<()> {
    for (name, value) in GLOBAL_SYSCTLS {
        let file = Path::new("/run/sysctl").join(name);
        fs::create_dir_all(file.parent().unwrap_or(&file))?;
        fs::write(&file, format!("{value}\n"))?;
        bind(&file, &Path::new("/proc/sys").join(name), MsFlags::empty())?;
    }
    for (name, value) in [
        ("ip_forward", "1"),
        ("conf/all/rp_filter", "0"),
        ("conf/default/rp_filter", "0"),
    ] {
        fs::write(Path::new("/proc/sys/net/ipv4").join(name), value).with_context(|| format!("set {name}"))?;
    }
    if has_v6 {
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").context("enable IPv6 forwarding")?;
    }
    Ok(())
}

fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn mount_filesystem(kind: &str, target: &Path, options: &str) -> Result<()> {
    let options = (!options.is_empty()).then_some(options);
    mount(Some(kind), target, Some(kind), MsFlags::empty(), options)
        .with_context(|| format!("mount {kind} on {} ({options:?})", target.display()))
}

fn bind(from: &Path, to: &Path, more: MsFlags) -> Result<()> {
    mount(Some(from), to, NONE, MsFlags::MS_BIND | more, NONE)
        .with_context(|| format!("bind {} to {}", from.display(), to.display()))
}
