//! The userspace device between network namespaces, with the kernel's offload and several workers. Needs root.

mod netns;
mod userspace;

use wg_agent::device::userspace::Options;

/// Four threads each way, also where there are no cores for them.
const OPTIONS: Options = Options {
    offload: true,
    workers: 4,
};
