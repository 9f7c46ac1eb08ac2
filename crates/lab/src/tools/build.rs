//! Builds the programs of a set with `go build` in a temporary directory, which is renamed when all are built.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::sets::{ArtefactSet, GoBuild};
use crate::{Error, Result};

/// Builds `set` into `target`. The caller holds the build lock, so an existing temporary directory belongs to a build
/// that failed or was killed.
pub(super) fn build(set: ArtefactSet, home: &Path, target: &Path, progress: &dyn Fn(&str)) -> Result<()> {
    let temporary = home.join(format!("{}.unfinished", set.name()));
    if temporary.exists() {
        std::fs::remove_dir_all(&temporary).map_err(Error::io(format!("remove {}", temporary.display())))?;
    }
    std::fs::create_dir_all(&temporary).map_err(Error::io(format!("create {}", temporary.display())))?;
    let builds = set.builds();
    for (index, build) in builds.iter().enumerate() {
        let what = format!("{} {} of {}: {}", set.name(), index + 1, builds.len(), build.output);
        go_build(set, build, home, &temporary, &what, progress)?;
    }
    std::fs::rename(&temporary, target).map_err(Error::io(format!("rename to {}", target.display())))
}

fn go_build(
    set: ArtefactSet,
    build: &GoBuild,
    home: &Path,
    out: &Path,
    what: &str,
    progress: &dyn Fn(&str),
) -> Result<()> {
    let mut flags = String::from("-s -w");
    if !build.define.is_empty() {
        flags = format!("{flags} -X {}", build.define);
    }
    let mut command = Command::new("go");
    command
        .current_dir(set.source())
        .env("CGO_ENABLED", "0")
        .env_remove("GOFLAGS");
    if build.cgo_static {
        flags += " -linkmode external -extldflags -static";
        command.env("CGO_ENABLED", "1");
        if let Some(unpacked) = unpacked_libseccomp(home, progress)? {
            let pkgconfig = unpacked.libraries.join("pkgconfig");
            command
                .env("PKG_CONFIG_PATH", pkgconfig)
                .env("PKG_CONFIG_SYSROOT_DIR", unpacked.root);
        }
    }
    command.args([
        "build",
        "-buildvcs=false",
        "-trimpath",
        "-mod=readonly",
        "-tags",
        build.tags,
        "-ldflags",
        &flags,
    ]);
    command.arg("-o").arg(out.join(build.output)).arg(&build.package);
    let log_path = out.join("build.log");
    let log = std::fs::File::create(&log_path).map_err(Error::io(format!("create {}", log_path.display())))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);

    let start = Instant::now();
    progress(&format!("building {what}"));
    let mut child = command.spawn().map_err(Error::io("start `go build`"))?;
    let mut next_report = Duration::from_secs(30);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(Error::io("wait for `go build`"))? {
            break status;
        }
        if start.elapsed() >= next_report {
            progress(&format!("building {what}: {} s so far", start.elapsed().as_secs()));
            next_report += Duration::from_secs(30);
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let log = std::fs::read_to_string(&log_path).unwrap_or_default();
    let _ = std::fs::remove_file(&log_path);
    if !status.success() {
        let lines: Vec<_> = log.lines().collect();
        let output = lines[lines.len().saturating_sub(20)..].join("\n");
        return Err(Error::Command {
            command: format!("go build {}", build.package),
            status: status.to_string(),
            output,
        });
    }
    progress(&format!("built {what} in {:.0} s", start.elapsed().as_secs_f64()));
    Ok(())
}

/// An unpacked libseccomp.
struct Unpacked {
    root: PathBuf,
    /// The directory with libseccomp.a.
    libraries: PathBuf,
}

/// Provides libseccomp.a, with which runc is linked. If the system does not have it, unpacks Debian's packages into the
/// cache. `None` = the system has it.
fn unpacked_libseccomp(home: &Path, progress: &dyn Fn(&str)) -> Result<Option<Unpacked>> {
    let system = Command::new("pkg-config")
        .args(["--variable=libdir", "libseccomp"])
        .output();
    if let Ok(output) = system
        && output.status.success()
        && Path::new(String::from_utf8_lossy(&output.stdout).trim())
            .join("libseccomp.a")
            .exists()
    {
        return Ok(None);
    }
    let root = home.join("deb-libseccomp");
    if let Some(found) = find_unpacked(&root) {
        return Ok(Some(found));
    }
    progress("unpacking libseccomp-dev (for runc) into the cache");
    let missing = |why: &str| Error::Missing {
        what: format!("libseccomp.a, which runc is linked with ({why})"),
        remedy: "install the static libseccomp development files (Debian, Ubuntu: libseccomp-dev; Fedora: \
                 libseccomp-static), or run `apt-get update` so that the package can be downloaded"
            .into(),
    };
    let temporary = home.join("deb-libseccomp.unfinished");
    let _ = std::fs::remove_dir_all(&temporary);
    std::fs::create_dir_all(&temporary).map_err(Error::io(format!("create {}", temporary.display())))?;
    let script = "apt-get download -q libseccomp-dev libseccomp2 && for d in *.deb; do dpkg -x $d . || exit 1; done";
    let output = Command::new("sh").args(["-c", script]).current_dir(&temporary).output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output) => return Err(missing(String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => return Err(missing(&error.to_string())),
    }
    std::fs::rename(&temporary, &root).map_err(Error::io(format!("rename to {}", root.display())))?;
    find_unpacked(&root)
        .map(Some)
        .ok_or_else(|| missing("the package does not contain it"))
}

fn find_unpacked(root: &Path) -> Option<Unpacked> {
    let directories = std::fs::read_dir(root.join("usr/lib"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()));
    let libraries = directories
        .into_iter()
        .find(|directory| directory.join("libseccomp.a").exists())?;
    Some(Unpacked {
        root: root.into(),
        libraries,
    })
}
