package sampler_test

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/services/sampler"
)

// Each setting that cannot work is an error that names it, and says what it must be.
func TestConfig_Validate(t *testing.T) {
	if err := sampler.DefaultConfig().Validate(); err != nil {
		t.Fatalf("the defaults: %v", err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const vllm, images = "vllm=http://127.0.0.1:8000", "sglang-diffusion=http://127.0.0.1:30000"
	for _, tt := range []struct {
		engine string
		set    func(*sampler.Config)
		want   string // empty: the settings are right
	}{
		{"", func(c *sampler.Config) { c.Model = "" }, "model: empty; must be synthetic, a folder, or ORG/NAME of the Hub"},
		{"", func(c *sampler.Config) { c.AdapterScale = math.NaN() }, "adapter_scale: NaN; must be finite"},
		{"", func(c *sampler.Config) { c.WeightsDir = dir }, ""},
		{"", func(c *sampler.Config) { c.WeightsDir = file }, `weights_dir: "` + file + `"; must be a folder`},
		{"", func(c *sampler.Config) { c.WeightsDir = filepath.Join(dir, "none") }, "weights_dir: stat "},
		{"", func(c *sampler.Config) { c.Lane = "a.b" }, `lane: "a.b"`},
		{"", func(c *sampler.Config) { c.Batch = 1025 }, "batch: 1025; must be between 1 and 1024"},
		{"", func(c *sampler.Config) { c.Threads = -1 }, "threads: -1; must be between 0 and 1024"},
		{"", func(c *sampler.Config) { c.Workers = -1 }, "workers: -1; must be between 0 and 256"},
		{"", func(c *sampler.Config) { c.PolicyVersion = -1 }, "policy_version: -1; must not be negative"},
		{"", func(c *sampler.Config) { c.PublishWindowMiB = 0 }, "publish_window_mib: 0; must be between 1 and 16384"},
		{"", func(c *sampler.Config) { c.AckWait = time.Millisecond }, "ack_wait: 1ms; must be at least 1s"},
		{"", func(c *sampler.Config) { c.MaxDeliver = 0 }, "max_deliver: 0; must be positive"},
		{"", func(c *sampler.Config) { c.DrainTimeout = 0 }, "drain_timeout: 0s; must be positive"},
		{"", func(c *sampler.Config) { c.EngineKey = "secret" }, "engine_key: set; must be absent without engine"},
		{"", func(c *sampler.Config) { c.EngineAdapters = dir }, "engine_adapters: set; must be absent without engine"},
		{"", func(c *sampler.Config) { c.Compile = true }, "compile: set; must be absent without --engine torch"},
		{"", func(c *sampler.Config) { c.VAETiling = true }, "vae_tiling: set; must be absent without --engine torch"},
		{"torch", func(c *sampler.Config) { c.VAETiling = true }, ""},
		{"", func(c *sampler.Config) { c.TrustClass = true }, "trust_class: set; must be absent without --engine torch"},
		{"", func(c *sampler.Config) { c.Family = "a.py:A" }, "family: set; must be absent without --engine torch"},
		{"torch", func(c *sampler.Config) { c.Family = "a.py:A" }, ""},
		{"", func(c *sampler.Config) { c.Network = "vllm-omni" }, "network: set; must be absent without --engine torch"},
		{"torch", func(c *sampler.Config) { c.Network = "vllm-omni" }, ""},
		{"torch", func(c *sampler.Config) { c.Network = "vllm" }, `network: "vllm"; must be diffusers or vllm-omni`},
		{"torch=localhost:1", func(c *sampler.Config) { c.Network = "vllm-omni" }, "network: set; must be absent beside torch="},
		{"torch", func(c *sampler.Config) { c.Family = "a.py" }, `family: "a.py"; must be FILE.py:NAME`},
		{"torch", func(c *sampler.Config) { c.EngineAdapters = dir }, "engine_adapters: set; must be absent with torch"},
		{"torch", func(c *sampler.Config) { c.WeightsDir, c.Compile = dir, true }, ""},
		{
			"", func(c *sampler.Config) { c.TextEncoderDevice = "cpu" },
			"text_encoder_device: set; must be absent without --engine torch",
		},
		{"torch", func(c *sampler.Config) { c.TextEncoderDevice = "cpu" }, ""},
		{
			"torch", func(c *sampler.Config) { c.TextEncoderDevice = "cpu,cuda:1" },
			`text_encoder_device: "cpu,cuda:1"; must be one device`,
		},
		{vllm, func(*sampler.Config) {}, ""},
		{vllm, func(c *sampler.Config) { c.EngineAdapters, c.WeightsDir = dir, dir }, ""},
		{vllm, func(c *sampler.Config) { c.EngineAdapters = file }, `engine_adapters: "` + file + `"; must be a folder`},
		{vllm, func(c *sampler.Config) { c.WeightsDir = dir }, "weights_dir: set; must be absent without engine_adapters"},
		{vllm, func(c *sampler.Config) { c.EngineConcurrency = 0 }, "engine_concurrency: 0; must be between 1 and 1024"},
		{vllm, func(c *sampler.Config) { c.EnginePatience = 0 }, "engine_patience: 0s; must be at least 1s"},
		{vllm, func(c *sampler.Config) { c.Batch = 2 }, "batch: set; must be absent beside a server of texts"},
		{vllm, func(c *sampler.Config) { c.Workers = 2 }, "workers: set; must be absent beside a server of texts"},
		{vllm, func(c *sampler.Config) { c.Adapter = "a" }, "adapter: set; must be absent beside engine: the server computes"},
		{vllm, func(c *sampler.Config) { c.Device = "cuda" }, "device: set; must be absent beside engine: the server computes"},
		{vllm, func(c *sampler.Config) { c.DType = "bf16" }, "dtype: set; must be absent beside engine: the server computes"},
		{vllm, func(c *sampler.Config) { c.Deterministic = true }, "deterministic: set; must be absent beside engine"},
		{images, func(c *sampler.Config) { c.EngineConcurrency = 2 }, "engine_concurrency: set; must be absent but for a server of texts"},
		{"torch", func(c *sampler.Config) { c.EngineConcurrency = 3 }, "engine_concurrency: set; must be absent but for a server of texts"},
		{images, func(c *sampler.Config) { c.Batch, c.Workers = 2, 2 }, ""},
		{"horse=http://127.0.0.1:1", func(*sampler.Config) {}, "engine: "},
	} {
		c := sampler.DefaultConfig()
		c.Engine = tt.engine
		tt.set(&c)
		err := c.Validate()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("--engine %q: error %v; want %q", tt.engine, err, tt.want)
		}
	}
}
