//! Builds the guest's initramfs: busybox, the kernel modules that the boot needs, and the two scripts that start the
//! command of [`super::Machine`].

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::find;
use crate::{Error, Result};

/// The script that mounts the guest's root: the host's root with a writable layer in memory.
pub(super) const INIT: &str = include_str!("init.sh");
/// The script that runs as pid 1 on that root: it starts the command and powers off.
pub(super) const STAGE2: &str = include_str!("stage2.sh");

/// A cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst).
pub(super) fn initramfs(modules: &[PathBuf]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", "host", "upper", "root", "modules"] {
        archive.add(directory.as_bytes(), 0o040_755, b"");
    }
    archive.add(
        b"busybox",
        0o100_755,
        &read(&find("busybox").unwrap_or_else(|| "busybox".into()))?,
    );
    archive.add(b"init", 0o100_755, INIT.as_bytes());
    archive.add(b"stage2", 0o100_755, STAGE2.as_bytes());
    for (order, module) in modules.iter().enumerate() {
        let name = [
            format!("modules/{order:02}-").as_bytes(),
            module.file_name().unwrap_or_default().as_bytes(),
        ]
        .concat();
        archive.add(&name, 0o100_644, &read(module)?);
    }
    Ok(archive.end())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(Error::io(format!("read {}", path.display())))
}

#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &[u8], mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = 1 + u32::from(mode & 0o040_000 != 0);
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        // inode, mode, owner, group, links, time, size, device (major, minor), special device (major, minor), name size, checksum
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        fields
            .iter()
            .for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name);
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.add(b"TRAILER!!!", 0, b"");
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpio_headers_and_contents_are_aligned_to_four_bytes() {
        let mut archive = Archive::default();
        archive.add(b"init", 0o100_755, b"hello");
        let bytes = archive.end();
        let header = "070701 00000001 000081ed 00000000 00000000 00000001 00000000 00000005 00000000 00000000 00000000 \
                      00000000 00000005 00000000";
        let header = header.replace(' ', "");
        assert_eq!(std::str::from_utf8(&bytes[..110]).unwrap(), header);
        assert_eq!(&bytes[110..130], [&b"init\0\0hello\0\0\0"[..], b"070701"].concat());
        assert_eq!(bytes.len() % 4, 0);
    }
}
