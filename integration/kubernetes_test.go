package integration_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/santhosh-tekuri/jsonschema/v6"
	yaml "go.yaml.in/yaml/v3"

	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
)

const manifests = "deploy/kubernetes"

// torchManifests are applied beside them.
const torchManifests = manifests + "/torch"

// manifest is what these tests read of a Kubernetes object beyond its schema.
type manifest struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		Selector struct {
			MatchLabels map[string]string `yaml:"matchLabels"`
		}
		Template struct {
			Metadata struct{ Labels map[string]string }
			Spec     struct {
				Grace    int64 `yaml:"terminationGracePeriodSeconds"`
				Security struct {
					RunAsNonRoot bool `yaml:"runAsNonRoot"`
				} `yaml:"securityContext"`
				Init []struct {
					Image    string
					Restart  string `yaml:"restartPolicy"`
					Args     []string
					Security struct {
						ReadOnly bool `yaml:"readOnlyRootFilesystem"`
					} `yaml:"securityContext"`
				} `yaml:"initContainers"`
				Containers []struct {
					Image string
					Env   []struct {
						Name, Value string
						ValueFrom   any `yaml:"valueFrom"`
					}
					Ports []struct {
						Name          string
						ContainerPort int `yaml:"containerPort"`
					}
					Liveness  probe `yaml:"livenessProbe"`
					Readiness probe `yaml:"readinessProbe"`
					Security  struct {
						ReadOnly bool `yaml:"readOnlyRootFilesystem"`
					} `yaml:"securityContext"`
				}
			}
		}
		ScaleTargetRef struct{ Name string } `yaml:"scaleTargetRef"`
		Triggers       []struct {
			Type     string
			Metadata map[string]string
		}
	}

	file string
	raw  any
}

type probe struct {
	HTTPGet struct{ Path, Port string } `yaml:"httpGet"`
}

// readManifests reads what the kustomizations name.
func readManifests(t *testing.T) []manifest {
	t.Helper()
	return append(manifestsIn(t, manifests), manifestsIn(t, torchManifests)...)
}

func manifestsIn(t *testing.T, folder string) (out []manifest) {
	t.Helper()
	var k struct{ Resources []string }
	if err := yaml.Unmarshal([]byte(read(t, folder+"/kustomization.yaml")), &k); err != nil {
		t.Fatal(err)
	}
	for _, file := range k.Resources {
		text := []byte(read(t, filepath.Join(folder, file)))
		typed, raw := yaml.NewDecoder(bytes.NewReader(text)), yaml.NewDecoder(bytes.NewReader(text))
		for {
			m := manifest{file: file}
			err := raw.Decode(&m.raw)
			if errors.Is(err, io.EOF) {
				break
			}
			if err = errors.Join(err, typed.Decode(&m)); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			out = append(out, m)
		}
	}
	return out
}

// Every manifest is what Kubernetes and KEDA define, and no field is one that they do not have.
func TestKubernetes_Schemas(t *testing.T) {
	kinds := map[string]*jsonschema.Schema{}
	compiler := jsonschema.NewCompiler()
	for _, name := range []string{"kubernetes.json", "keda.json"} {
		document, err := jsonschema.UnmarshalJSON(strings.NewReader(read(t, filepath.Join(manifests, "schemas", name))))
		if err != nil {
			t.Fatal(err)
		}
		if err := compiler.AddResource(name, document); err != nil {
			t.Fatal(err)
		}
		for kind := range document.(map[string]any)["properties"].(map[string]any) {
			if kinds[kind], err = compiler.Compile(name + "#/properties/" + kind); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(kind string, object any) error {
		text, err := json.Marshal(object)
		if err != nil {
			return err
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			return err
		}
		if kinds[kind] == nil {
			return fmt.Errorf("kind %q has no schema", kind)
		}
		return kinds[kind].Validate(value)
	}
	found := readManifests(t)
	if len(found) != 14 {
		t.Errorf("%d manifests; the namespace, the network, and of four services and a sampler with PyTorch a "+
			"Deployment "+
			"and a PodDisruptionBudget each, two of them scaled", len(found))
	}
	files, err := filepath.Glob(filepath.Join(root, manifests, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name := filepath.Base(f)
		if !slices.ContainsFunc(found, func(m manifest) bool { return m.file == name }) &&
			name != "kustomization.yaml" &&
			name != "nats.yaml" {
			t.Errorf("%s is not in the kustomization", name)
		}
	}
	for _, m := range found {
		if err := check(m.Kind, m.raw); err != nil {
			t.Errorf("%s: %s %s: %v", m.file, m.Kind, m.Metadata.Name, err)
		}
		object := m.raw.(map[string]any)
		spec, _ := object["spec"].(map[string]any)
		if spec == nil {
			continue
		}
		spec["replicsa"] = 2 // the check can fail
		if check(m.Kind, m.raw) == nil {
			t.Errorf("%s: a field that %s does not have is no error", m.file, m.Kind)
		}
	}
}

// The programs take what the manifests give them, are asked where they serve, have the time that
// they need to drain, and are scaled by the consumers that they work on.
func TestKubernetes_Deployments(t *testing.T) {
	t.Parallel()
	consumers := map[string][2]string{
		"sampler": {schemas.StreamRequests, schemas.RequestsDurable("signs").Name},
		"reward":  {schemas.StreamTrajectories, schemas.TrajectoriesDurable().Name},
	}
	deployments, protected := map[string]bool{}, map[string]bool{}
	for _, m := range readManifests(t) {
		name := m.Metadata.Name
		switch m.Kind {
		case "PodDisruptionBudget":
			protected[m.Spec.Selector.MatchLabels["app.kubernetes.io/name"]] = true
		case "ScaledObject":
			want := consumers[m.Spec.ScaleTargetRef.Name]
			delete(consumers, m.Spec.ScaleTargetRef.Name)
			trigger := m.Spec.Triggers[0]
			if trigger.Type != "nats-jetstream" || trigger.Metadata["stream"] != want[0] ||
				trigger.Metadata["consumer"] != want[1] ||
				trigger.Metadata["account"] != server.DEFAULT_GLOBAL_ACCOUNT {
				t.Errorf("%s is scaled by %+v; want the consumer %s of %s", name, trigger, want[1], want[0])
			}
		case "Deployment":
			deployments[name] = true
			deployed(t, m)
		}
	}
	if len(consumers) != 0 {
		t.Errorf("not scaled: %v", consumers)
	}
	for _, name := range stages {
		if !deployments[name] || !protected[name] {
			t.Errorf("%s: deployed %v, with a disruption budget %v", name, deployments[name], protected[name])
		}
	}
}

func deployed(t *testing.T, m manifest) {
	t.Helper()
	pod := m.Spec.Template.Spec
	c := pod.Containers[0]
	for label, value := range m.Spec.Selector.MatchLabels {
		if m.Spec.Template.Metadata.Labels[label] != value {
			t.Errorf("%s selects %s=%s, which its pods do not have", m.file, label, value)
		}
	}
	if c.Liveness.HTTPGet.Path != "/healthz" || c.Readiness.HTTPGet.Path != "/readyz" ||
		c.Liveness.HTTPGet.Port != c.Ports[0].Name || c.Readiness.HTTPGet.Port != c.Ports[0].Name {
		t.Errorf("%s: probes %+v and %+v, port %+v", m.file, c.Liveness, c.Readiness, c.Ports)
	}
	if !c.Security.ReadOnly || !pod.Security.RunAsNonRoot {
		t.Errorf("%s is not hardened", m.file)
	}
	cmd := exec.Command(program(t, c.Image), "--print-config")
	cmd.Dir, cmd.Env = t.TempDir(), []string{}
	for _, v := range c.Env {
		value := v.Value
		if v.ValueFrom != nil {
			value = "secret-of-the-test"
		}
		cmd.Env = append(cmd.Env, v.Name+"="+value)
	}
	out, err := cmd.CombinedOutput()
	var config struct {
		HealthAddr   string `yaml:"health_addr"`
		DrainTimeout string `yaml:"drain_timeout"`
		Replicas     string `yaml:"stream_replicas"`
	}
	if err = errors.Join(err, yaml.Unmarshal(out, &config)); err != nil {
		t.Fatalf("%s: %v\n%s", m.file, err, out)
	}
	if config.HealthAddr != fmt.Sprintf("0.0.0.0:%d", c.Ports[0].ContainerPort) {
		t.Errorf("%s serves its health at %s, and is asked at port %d", m.file, config.HealthAddr,
			c.Ports[0].ContainerPort)
	}
	if drain, err := time.ParseDuration(config.DrainTimeout); err != nil ||
		time.Duration(pod.Grace)*time.Second < drain+10*time.Second {
		t.Errorf("%s drains for %s and is ended after %d s", m.file, config.DrainTimeout, pod.Grace)
	}
	if m.Metadata.Name == "intake" && config.Replicas != "3" {
		t.Errorf("%s: streams on %q servers; want them on all three", m.file, config.Replicas)
	}
}

// The worker is a sidecar that outlives the sampler's drain, with the same model and at the socket that the sampler
// joins; the worker of tests takes its arguments.
func TestKubernetes_Torch(t *testing.T) {
	t.Parallel()
	pod := manifestsIn(t, torchManifests)[0].Spec.Template.Spec
	if len(pod.Init) != 1 || pod.Init[0].Restart != "Always" || pod.Init[0].Image != "meander-torch" ||
		!pod.Init[0].Security.ReadOnly {
		t.Fatalf("%+v; want one sidecar that is hardened", pod.Init)
	}
	env := map[string]string{}
	for _, v := range pod.Containers[0].Env {
		env[v.Name] = v.Value
	}
	socket := strings.TrimPrefix(env["MEANDER_SAMPLER_ENGINE"], "torch=unix:")
	if args := pod.Init[0].Args; !slices.Contains(args, "--socket="+socket) ||
		!slices.Contains(args, "--model="+env["MEANDER_SAMPLER_MODEL"]) {
		t.Errorf("the worker has %v, the sampler %v; want one socket and one model", args, env)
	}
	dir, err := os.MkdirTemp("/tmp", "meander-test-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	var args []string
	for _, a := range pod.Init[0].Args {
		args = append(args, strings.NewReplacer(env["MEANDER_SAMPLER_MODEL"], remotetest.Folder(t, "FluxPipeline", 1),
			socket,
			filepath.Join(dir, "s")).Replace(a))
	}
	joinWorker(t, args...)
}

// kubectl, where there is one, puts the manifests together.
func TestKubernetes_Kustomization(t *testing.T) {
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skip("the kustomization is not built: there is no kubectl here")
	}
	for folder, kinds := range map[string]int{manifests: 12, torchManifests: 2} {
		cmd := exec.Command("kubectl", "kustomize", filepath.Join(root, folder))
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil || bytes.Count(append([]byte("\n"), out...), []byte("\nkind: ")) != kinds {
			t.Errorf("%s: %v\n%s", folder, err, out)
		}
	}
}

// The sizes in deploy/guide/cluster.md are those that the command there gives, and what is made of them adds up.
func TestSizing(t *testing.T) {
	t.Parallel()
	page := read(t, "deploy/guide/cluster.md")
	_, command, _ := strings.Cut(page, "\nbin/meander run --dry-run ")
	command, _, _ = strings.Cut(command, "\n")
	var got struct {
		Estimate struct {
			Samples    int64 `json:"samples"`
			Steps      int64 `json:"steps"`
			Sample     int64 `json:"bytes_per_sample"`
			StepBytes  int64 `json:"step_bytes"`
			ImageBytes int64 `json:"image_bytes"`
			Trajectory int64 `json:"trajectory_bytes"`
		} `json:"estimate"`
	}
	if err := json.Unmarshal([]byte(meander(t, t.TempDir(),
		append([]string{"run", "--dry-run"}, strings.Fields(command)...)...).must(t, 0).stdout), &got); err != nil {
		t.Fatal(err)
	}
	e := got.Estimate
	const samplesPerSecond = 64 / 4
	for _, want := range []string{
		fmt.Sprintf("| %d |", e.StepBytes/e.Samples), fmt.Sprintf("| %d |", e.ImageBytes/e.Samples),
		fmt.Sprintf("| %d |", e.Trajectory/e.Samples),
		fmt.Sprintf("%d samples/s: %d events/s and %.0f MB/s", samplesPerSecond, samplesPerSecond*(e.Steps/e.Samples+5),
			samplesPerSecond*float64(e.Sample)/1e6),
		fmt.Sprintf("(%.0f MiB/s)", samplesPerSecond*float64(e.Sample)/(1<<20)),
		fmt.Sprintf("a TB in %.1f hours", 1e12/(samplesPerSecond*float64(e.Sample))/3600),
	} {
		if !strings.Contains(page, want) {
			t.Errorf("deploy/guide/cluster.md does not say %q", want)
		}
	}
}
