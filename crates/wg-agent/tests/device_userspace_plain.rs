//! The userspace device between network namespaces where the kernel offers nothing: packet by packet. Needs root.

mod netns;
mod userspace;

use wg_agent::device::userspace::Options;

/// One thread each way.
const OPTIONS: Options = Options {
    offload: false,
    workers: 1,
};
