//! Runs the tests that every device backend must pass (`clustermesh_tests::contract`) with the userspace backend, and tests
//! which backend `auto` chooses. Needs root.

use clustermesh_tests::{contract, netns};
use wg_agent::device::{self, Backend, Configuration, DeviceError};

macro_rules! case {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            contract::$name(Backend::Userspace);
        }
    )* };
}
clustermesh_tests::each_device_test!(case);

#[test]
fn auto_backend_depends_on_kernel_support() {
    let ns = netns::NetNs::new("auto");
    let kernel_has_wireguard = ns
        .output("ip", &["link", "add", "probe", "type", "wireguard"])
        .status
        .success();
    let configuration = Configuration {
        private_key: [1; 32].into(),
        listen_port: 51820,
        fwmark: 0,
        mtu: 1420,
    };
    let name = netns::unique_name("wa");
    let open = |backend| ns.enter(|| device::open(backend, &name, &configuration, Default::default()));
    let opened = open(Backend::Auto).expect("a device");
    let want = if kernel_has_wireguard {
        ("kernel", "--backend=auto: this node's kernel has WireGuard")
    } else {
        (
            "userspace",
            "--backend=auto: this node's kernel has no WireGuard (EOPNOTSUPP)",
        )
    };
    assert_eq!((opened.device.backend(), opened.reason), want);
    opened.device.close().expect("close");
    if !kernel_has_wireguard {
        let error = open(Backend::Kernel).map(drop).expect_err("no kernel WireGuard");
        assert!(matches!(error, DeviceError::NoKernelWireguard), "{error}");
        assert_eq!(contract::links(&ns), ["lo"]);
    }
}
