//! Reads and writes the kernel settings that [`clustermesh_agent_core::sysctl`] computes.
//!
//! In an unprivileged container `/proc/sys` is read-only. IPv4 settings of one interface can still be written over rtnetlink
//! with NET_ADMIN (IFLA_INET_CONF, Linux 2.6.37). The init container or the host sets the others.

use std::{collections::BTreeSet, fs, io};

use clustermesh_agent_core::{
    interface::InterfaceName,
    sysctl::{Name, Sysctl},
};
use clustermesh_netlink::{Protocol, Socket, link};
use netlink_packet_core::DefaultNla;
use netlink_packet_route::link::{AfSpecUnspec, LinkAttribute};

/// A setting that is still wrong: the agent does not write it ([`Sysctl::write`] is false), the write failed, or the greater
/// value of `conf/all` is in force after the write.
#[derive(Debug, thiserror::Error)]
#[error("{} {}: {}; {}", .sysctl.name, .found, .sysctl.why, remedy(.sysctl, .error.as_ref()))]
pub struct WrongSetting {
    /// The setting.
    pub sysctl: Sysctl,
    /// A clause about the current value, such as `is 0`.
    pub found: String,
    /// The error of the write, if one was tried and failed.
    pub error: Option<io::Error>,
}

fn remedy(sysctl: &Sysctl, error: Option<&io::Error>) -> String {
    let tried = error.map(|e| format!("writing it failed: {e}; ")).unwrap_or_default();
    let Sysctl { name, value, .. } = sysctl;
    format!("{tried}set it on the host or in the DaemonSet's init container: sysctl -w {name}={value}")
}

/// The result of applying settings.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Settings that were wrong and were written.
    pub written: BTreeSet<Name>,
    /// Settings that are still wrong.
    pub wrong: Vec<WrongSetting>,
}

/// Like [`converge`], but returns only the settings that are still wrong.
pub async fn ensure(wanted: &[Sysctl]) -> Vec<WrongSetting> {
    converge(wanted).await.wrong
}

/// Checks every setting in the caller's network namespace, and writes those wrong ones whose [`Sysctl::write`] is true. The
/// agent can run with a wrong setting; `Sysctl::why` names what does not work then.
pub async fn converge(wanted: &[Sysctl]) -> Outcome {
    let Outcome { mut written, mut wrong } = Outcome::default();
    for sysctl in wanted {
        if check(sysctl).is_err() {
            let error = if sysctl.write { write(sysctl).err() } else { None };
            if let Err(found) = check(sysctl) {
                wrong.push(WrongSetting {
                    sysctl: sysctl.clone(),
                    found,
                    error,
                });
            } else {
                written.insert(sysctl.name.clone());
            }
        }
    }
    Outcome { written, wrong }
}

/// The file of a setting. `instead` = an interface that replaces the one in the name.
fn path(name: &Name, instead: Option<&str>) -> String {
    match (name, instead) {
        (Name::Global(path), _) => format!("/proc/sys/net/{path}"),
        (Name::Interface(interface, key), instead) => {
            format!(
                "/proc/sys/net/ipv4/conf/{}/{key}",
                instead.unwrap_or(interface.as_str())
            )
        }
    }
}

fn read(path: &str) -> io::Result<u8> {
    let text = fs::read_to_string(path)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::other(format!("contains {:?}", text.trim())))
}

/// Checks the effective value. For a global setting, and for `forwarding` of an interface, it is the setting's own value. For the other
/// settings of an interface it is the greater of the interface's own value and the value of `all`: rp_filter and src_valid_mark
/// (Documentation/networking/ip-sysctl.rst), ignore_routes_with_linkdown (tested on Linux 6.18).
fn check(sysctl: &Sysctl) -> Result<(), String> {
    let own = match read(&path(&sysctl.name, None)) {
        Ok(own) => own,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let missing = match &sysctl.name {
                Name::Global(_) => "does not exist in this kernel".to_owned(),
                Name::Interface(interface, _) => format!("does not exist: there is no interface {interface}"),
            };
            return Err(missing);
        }
        Err(e) => return Err(format!("cannot be read ({e})")),
    };
    let all = match sysctl.name {
        Name::Global(_) | Name::Interface(_, "forwarding") => own,
        Name::Interface(..) => read(&path(&sysctl.name, Some("all"))).unwrap_or(0),
    };
    match own.max(all) {
        value if sysctl.accept.contains(&value) => Ok(()),
        value => Err(format!("is {value}")),
    }
}

fn write(sysctl: &Sysctl) -> io::Result<()> {
    let Err(error) = fs::write(path(&sysctl.name, None), sysctl.value.to_string()) else {
        return Ok(());
    };
    match &sysctl.name {
        // `NotFound` = the interface or setting does not exist, so netlink cannot write it either.
        Name::Interface(interface, key) if error.kind() != io::ErrorKind::NotFound => {
            set_devconf(interface, key, sysctl.value)
        }
        _ => Err(error),
    }
}

/// Writes a setting of an interface without `/proc`: RTM_SETLINK with IFLA_AF_SPEC / AF_INET / IFLA_INET_CONF, in which
/// the attribute type is the setting's number (linux/ip.h, IPV4_DEVCONF_*).
fn set_devconf(interface: &InterfaceName, key: &str, value: u8) -> io::Result<()> {
    const IFLA_INET_CONF: u16 = 1;
    let number: u16 = match key {
        "forwarding" => 1,
        "rp_filter" => 8,
        "src_valid_mark" => 24,
        "ignore_routes_with_linkdown" => 29,
        _ => return Err(io::Error::from(io::ErrorKind::Unsupported)),
    };
    let socket = Socket::open(Protocol::Route)?;
    let device = link::by_name(&socket, interface.as_str())?.ok_or(io::ErrorKind::NotFound)?;
    let setting = encode_attribute(number, &u32::from(value).to_ne_bytes());
    let inet = DefaultNla::new(libc::AF_INET as u16, encode_attribute(IFLA_INET_CONF, &setting));
    let attribute = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Other(inet)]);
    Ok(link::set(&socket, device.header.index, vec![attribute])?)
}

/// Encodes an attribute: length, type, value. It needs no padding, because the lengths here are multiples of four.
fn encode_attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    [&length.to_ne_bytes(), &kind.to_ne_bytes(), value].concat()
}
