// hostmounts stands between containerd and runc. An image that holds the file /.host-mounts (a JSON list of absolute
// paths) gets those paths of the machine, read-only, in its containers; any other image is left alone. So a pod can run
// the machine's Python without a hostPath in its spec and without gigabytes being packed into an image.
//
// It is called with runc's arguments and becomes runc, whose path is in PD_RUNC.
package main

import (
	"encoding/json"
	"log"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
)

const listName = ".host-mounts"

func main() {
	runc := os.Getenv("PD_RUNC")
	if runc == "" {
		log.Fatal("PD_RUNC must hold the path of runc")
	}
	if bundle := bundleOfCreate(os.Args[1:]); bundle != "" {
		if err := addMounts(bundle); err != nil {
			log.Fatal(err)
		}
	}
	log.Fatal(syscall.Exec(runc, append([]string{runc}, os.Args[1:]...), os.Environ()))
}

// bundleOfCreate is the bundle folder if the arguments create a container, else "".
func bundleOfCreate(arguments []string) string {
	create := false
	for i, argument := range arguments {
		switch {
		case argument == "create":
			create = true
		case create && argument == "--bundle" && i+1 < len(arguments):
			return arguments[i+1]
		}
	}
	return ""
}

func depth(mount any) int {
	fields, _ := mount.(map[string]any)
	destination, _ := fields["destination"].(string)
	return strings.Count(strings.Trim(filepath.Clean(destination), "/"), "/")
}

func addMounts(bundle string) error {
	content, err := os.ReadFile(filepath.Join(bundle, "rootfs", listName))
	if os.IsNotExist(err) {
		return nil
	} else if err != nil {
		return err
	}
	var paths []string
	if err := json.Unmarshal(content, &paths); err != nil {
		return err
	}
	file := filepath.Join(bundle, "config.json")
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(raw, &spec); err != nil {
		return err
	}
	mounts, _ := spec["mounts"].([]any)
	added := []any{}
	for _, path := range paths {
		added = append(added, map[string]any{
			"destination": path, "type": "bind", "source": path,
			"options": []string{"rbind", "ro", "nosuid", "nodev"}})
	}
	// Outer ones first, the machine's before the pod's where they are level: neither hides what lies inside it. A pod may
	// mount an empty /tmp while the machine's Python lies below /tmp, or a file inside one of the machine's folders.
	all := append(added, mounts...)
	sort.SliceStable(all, func(i, j int) bool { return depth(all[i]) < depth(all[j]) })
	spec["mounts"] = all
	out, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(file, out, 0o600)
}
