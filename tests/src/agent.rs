//! The path of the agent's program, and a script that limits an agent's privileges as the DaemonSet does.

use std::sync::LazyLock;

/// The path of the agent's program.
pub fn agent_program() -> &'static str {
    static AGENT: LazyLock<String> = LazyLock::new(|| crate::program("wg-agent"));
    &AGENT
}

/// A shell script that runs its arguments as the DaemonSet's container runs the agent: NET_ADMIN is the only capability, and
/// `/proc/sys` is read-only. It must run in a mount namespace of its own.
pub const AGENT_PRIVILEGES: &str = "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; \
                            exec setpriv --bounding-set=-all,+net_admin --no-new-privs -- \"$@\"";

/// The words before a program that shall run with [`AGENT_PRIVILEGES`], in a mount namespace of its own.
pub const AS_AGENT: [&str; 6] = ["unshare", "--mount", "sh", "-ec", AGENT_PRIVILEGES, "sh"];
