//! The drivers, and the packages that contain them. To add a driver, add an entry to [`DRIVERS`].
//! It needs a separate [`Bundle`] only if no other driver's packages contain it.

/// Packages that are fetched together and unpacked into `target/gpu/NAME`.
#[derive(Debug)]
pub struct Bundle {
    pub name: &'static str,
    pub title: &'static str,
    /// The size of the download.
    pub size: &'static str,
    /// Debian suites, the preferred one last. Without suites: the sources of this machine's apt.
    pub suites: &'static [&'static str],
    pub packages: &'static [&'static str],
    /// True if the packages are fetched without their dependencies.
    pub alone: bool,
    /// A large package that is not installed, and the patterns of the files to extract.
    pub part: Option<(&'static str, &'static [&'static str])>,
}

/// The environment that programs need to find a driver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interface {
    /// An ICD file, which is generated.
    Vulkan,
    Egl,
    /// Nothing: the bundle is no driver.
    Tools,
    /// Nothing: the programs of the packages run in a separate root.
    Root,
}

#[derive(Debug)]
pub struct Driver {
    /// The name for `WGPU_ATTENTION_DRIVER`.
    pub name: &'static str,
    /// Lines of the usage text.
    pub about: &'static str,
    pub title: &'static str,
    pub bundle: &'static Bundle,
    /// The library that programs load, or one of the programs.
    pub file: &'static str,
    pub interface: Interface,
    /// A library that is loaded first. It simulates the kernel driver of a GPU that is not present.
    pub preload: Option<&'static str>,
    /// Further variables; `{root}` is the folder of the unpacked packages.
    pub variables: &'static [(&'static str, &'static str)],
    /// True if LLVM compiles the driver's shaders. Compiling them takes longer than the tests run
    /// them.
    pub llvm: bool,
}

const LAVAPIPE_26: Bundle = Bundle {
    name: "lavapipe-26",
    title: "lavapipe 26",
    size: "75 MB",
    suites: &["trixie", "trixie-backports"],
    packages: &[
        "mesa-vulkan-drivers",
        "mesa-drm-shim",
        "libvulkan1",
        "vulkan-validationlayers",
        "libc6",
        "libstdc++6",
        "libgcc-s1",
    ],
    alone: false,
    part: None,
};

const LAVAPIPE_25: Bundle = Bundle {
    name: "lavapipe-25",
    title: "lavapipe 25.0",
    size: "70 MB",
    suites: &["bookworm", "bookworm-backports"],
    packages: &["mesa-vulkan-drivers", "libvulkan1", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

const SWIFTSHADER: Bundle = Bundle {
    name: "swiftshader",
    title: "SwiftShader",
    size: "40 MB",
    suites: &["trixie"],
    packages: &["libvulkan1", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: Some(("chromium-common", &["*/libvk_swiftshader.so", "*/vk_swiftshader_icd.json"])),
};

const MESA_GL: Bundle = Bundle {
    name: "mesa-gl",
    title: "Mesa's OpenGL 26",
    size: "60 MB",
    suites: &["trixie", "trixie-backports"],
    packages: &["libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

const DISTRO: Bundle = Bundle {
    name: "distro",
    title: "this distribution's lavapipe",
    size: "80 MB",
    suites: &[],
    packages: &["mesa-vulkan-drivers", "libvulkan1", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

const SPIRV_TOOLS: Bundle = Bundle {
    name: "spirv-tools",
    title: "SPIRV-Tools",
    size: "20 MB",
    suites: &["trixie"],
    packages: &["spirv-tools", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

const GLSLC: Bundle = Bundle {
    name: "glslc",
    title: "glslc",
    size: "20 MB",
    suites: &["trixie"],
    packages: &["glslc", "libvulkan-dev", "spirv-headers", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

const WINE: Bundle = Bundle {
    name: "wine",
    title: "Wine, lavapipe 26 and a C compiler for Windows programs",
    size: "330 MB",
    suites: &["trixie", "trixie-backports"],
    packages: &[
        "wine64",
        "libwine",
        "gcc-mingw-w64-x86-64-win32",
        "xvfb",
        "dash",
        "mesa-vulkan-drivers",
        "libc6",
        "libstdc++6",
        "libgcc-s1",
    ],
    alone: false,
    part: None,
};

const FIREFOX: Bundle = Bundle {
    name: "firefox",
    title: "Firefox with lavapipe 26",
    size: "180 MB",
    suites: &["trixie", "trixie-backports"],
    packages: &["firefox-esr", "mesa-vulkan-drivers", "libvulkan1", "libc6", "libstdc++6", "libgcc-s1"],
    alone: false,
    part: None,
};

/// The first driver of a bundle is its main one.
pub const DRIVERS: &[Driver] = &[
    Driver {
        name: "lavapipe",
        about: "Mesa 26 in software, from Debian trixie-backports",
        title: "lavapipe 26",
        bundle: &LAVAPIPE_26,
        file: "libvulkan_lvp.so",
        interface: Interface::Vulkan,
        preload: None,
        variables: &[("VK_ADD_LAYER_PATH", "{root}/usr/share/vulkan/explicit_layer.d")],
        llvm: true,
    },
    Driver {
        name: "lavapipe-25",
        about: "Mesa 25.0 in software, from Debian bookworm-backports",
        title: "lavapipe 25.0",
        bundle: &LAVAPIPE_25,
        file: "libvulkan_lvp.so",
        interface: Interface::Vulkan,
        preload: None,
        variables: &[],
        llvm: true,
    },
    Driver {
        name: "swiftshader",
        about: "SwiftShader, from Debian's chromium",
        title: "SwiftShader",
        bundle: &SWIFTSHADER,
        file: "libvk_swiftshader.so",
        interface: Interface::Vulkan,
        preload: None,
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "mesa-gl",
        about: "OpenGL (EGL without a display) by Mesa 26 in software, for wgpu's GL backend",
        title: "Mesa's OpenGL 26",
        bundle: &MESA_GL,
        file: "libEGL_mesa.so.0",
        interface: Interface::Egl,
        preload: None,
        variables: &[
            ("LIBGL_ALWAYS_SOFTWARE", "true"),
            ("__EGL_VENDOR_LIBRARY_FILENAMES", "{root}/usr/share/glvnd/egl_vendor.d/50_mesa.json"),
        ],
        llvm: true,
    },
    Driver {
        name: "distro",
        about: "this distribution's own Mesa in software (apt-based systems)",
        title: "this distribution's lavapipe",
        bundle: &DISTRO,
        file: "libvulkan_lvp.so",
        interface: Interface::Vulkan,
        preload: None,
        variables: &[],
        llvm: true,
    },
    Driver {
        name: "nvk",
        about: "Mesa 26 for NVIDIA GPUs, from lavapipe's packages, like the next three. It compiles for the GPU that
NOUVEAU_CHIPSET names (162: Turing, 172: Ampere), which need not be present, and runs nothing",
        title: "NVK 26",
        bundle: &LAVAPIPE_26,
        file: "libvulkan_nouveau.so",
        interface: Interface::Vulkan,
        preload: Some("libnouveau_noop_drm_shim.so"),
        variables: &[("NVK_I_WANT_A_BROKEN_VULKAN_DRIVER", "1")],
        llvm: false,
    },
    Driver {
        name: "radv",
        about: "the same for AMD GPUs: AMDGPU_GPU_ID (vega10, navi10, navi21, navi31, gfx1201 ...)",
        title: "RADV 26",
        bundle: &LAVAPIPE_26,
        file: "libvulkan_radeon.so",
        interface: Interface::Vulkan,
        preload: Some("libamdgpu_noop_drm_shim.so"),
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "honeykrisp",
        about: "the same for Apple's M1",
        title: "Honeykrisp 26",
        bundle: &LAVAPIPE_26,
        file: "libvulkan_asahi.so",
        interface: Interface::Vulkan,
        preload: Some("libasahi_noop_drm_shim.so"),
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "turnip",
        about: "the same for Qualcomm's Adreno: FD_GPU_ID (660, 750, 830 ...)",
        title: "Turnip 26",
        bundle: &LAVAPIPE_26,
        file: "libvulkan_freedreno.so",
        interface: Interface::Vulkan,
        preload: Some("libfreedreno_noop_drm_shim.so"),
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "spirv-tools",
        about: "no driver: Khronos' tools, from Debian trixie, with a wrapper that runs them",
        title: "SPIRV-Tools",
        bundle: &SPIRV_TOOLS,
        file: "spirv-val",
        interface: Interface::Tools,
        preload: None,
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "glslc",
        about: "no driver: the compiler of GLSL and Vulkan's headers, from Debian trixie",
        title: "glslc",
        bundle: &GLSLC,
        file: "glslc",
        interface: Interface::Tools,
        preload: None,
        variables: &[],
        llvm: false,
    },
    Driver {
        name: "wine",
        about: "no driver: Wine, lavapipe 26 and mingw's gcc, from Debian, in a separate root (chroot), where they see
this repository, its target folder and cargo's home",
        title: "Wine",
        bundle: &WINE,
        file: "wine64",
        interface: Interface::Root,
        preload: None,
        variables: &[
            ("WINEPREFIX", "/home/wine"),
            ("WINELOADER", "/usr/lib/wine/wine64"),
            ("WINESERVER", "/usr/lib/wine/wineserver64"),
            ("WINEDEBUG", "-all"),
            ("WINEDLLOVERRIDES", "d3dcompiler_47=n;mscoree,mshtml,winemenubuilder.exe="),
            ("VK_DRIVER_FILES", "/usr/share/vulkan/icd.d/lvp_icd.json"),
        ],
        llvm: false,
    },
    Driver {
        name: "firefox",
        about: "no driver: Firefox, which scripts/browser and scripts/web start, and lavapipe 26, from Debian, in a
separate root as for Wine",
        title: "Firefox",
        bundle: &FIREFOX,
        file: "firefox-esr",
        interface: Interface::Root,
        preload: None,
        variables: &[("LC_ALL", "C.UTF-8"), ("VK_DRIVER_FILES", "/usr/share/vulkan/icd.d/lvp_icd.json")],
        llvm: false,
    },
];

pub fn find(name: &str) -> Option<&'static Driver> {
    DRIVERS.iter().find(|driver| driver.name == name)
}

impl Bundle {
    /// Returns the drivers of the bundle.
    pub fn drivers(&self) -> impl Iterator<Item = &'static Driver> {
        DRIVERS.iter().filter(|driver| driver.bundle.name == self.name)
    }
}

impl Driver {
    /// Returns a file of the driver, under `target/gpu/BUNDLE`.
    fn own(&self, main: &str, stem: &str, end: &str) -> String {
        let is_main = self.bundle.drivers().next().is_some_and(|first| first.name == self.name);
        if is_main { main.into() } else { format!("{stem}{}{end}", self.name) }
    }

    /// Returns the script that starts programs with the driver.
    pub fn wrapper(&self) -> String {
        self.own("run", "run-", "")
    }

    /// Returns the file that Vulkan's loader reads.
    pub fn icd(&self) -> String {
        self.own("icd.json", "", ".json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for (n, driver) in DRIVERS.iter().enumerate() {
            assert!(!["auto", "system"].contains(&driver.name));
            for other in &DRIVERS[..n] {
                assert_ne!(driver.name, other.name);
                if driver.bundle.name == other.bundle.name {
                    assert_ne!((driver.wrapper(), driver.icd()), (other.wrapper(), other.icd()));
                }
            }
        }
    }

    #[test]
    fn files_of_drivers() {
        let files = |name| find(name).map(|driver| [driver.wrapper(), driver.icd()]).unwrap();
        assert_eq!(files("lavapipe-25"), ["run", "icd.json"]);
        assert_eq!(files("radv"), ["run-radv", "radv.json"]);
    }
}
