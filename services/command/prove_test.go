package command

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/services/prove"
)

// shippedProof has the run of two updates of an adapter of signs, as an archive, and the adapter.
const shippedProof = "../../deploy/learn/proof/"

// keys writes an ed25519 key and its public one as PEM files.
func keys(t *testing.T) (private, public string) {
	t.Helper()
	of, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte, err error) string {
		name = filepath.Join(t.TempDir(), name)
		if err == nil {
			err = os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "KEY", Bytes: data}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	data, err := x509.MarshalPKCS8PrivateKey(key)
	private = write("key.pem", data, err)
	data, err = x509.MarshalPKIXPublicKey(of)
	return private, write("key.pub.pem", data, err)
}

// What is proved can be signed; the exit status and the last line say the same; another key, archive or adapter does
// not pass.
func TestProve(t *testing.T) {
	t.Parallel()
	archive := filepath.Join(t.TempDir(), "signs.tar")
	data, err := os.ReadFile(shippedProof + "signs.tar")
	if err == nil {
		err = os.WriteFile(archive, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	adapter := shippedProof + "adapter"
	private, public := keys(t)
	_, other := keys(t)
	links := []string{"--archive", archive, "--links", "archive,weights,chain,batch"}
	for _, of := range []struct {
		args   []string
		status int
		want   string // at the end of stdout, or in stderr
	}{
		{append([]string{adapter, "--signed", public}, links...), 1, "not proved: unchecked: 1 of 11 links\n"},
		{append([]string{adapter, "--sign", private}, links...), 0,
			"proved; left out: 6 of 10 links\nsigned in " + archive + ".sig\n"},
		{append([]string{"2", "--signed", public}, links...), 0, "proved; left out: 6 of 11 links\n"},
		{append([]string{"1", "--signed", public}, links...), 1, "not proved: broken: 1 of 11 links\n"},
		{append([]string{"2", "--signed", other}, links...), 1, "not proved: broken: 1 of 11 links\n"},
		{append([]string{"2", "--sign", public}, links...), 2, "must be a private ed25519 key in PEM"},
		{append([]string{"2", "--signed", private}, links...), 2, "must be a public ed25519 key in PEM"},
		{append([]string{"2", "--signed", "no.pem"}, links...), 2, "--signed: open no.pem: "},
		{[]string{"3", "--archive", archive}, 2, "version 3: not in the archive; must be one of"},
		{[]string{"--archive", archive, "--links", "weight"}, 2, `--links: "weight"`},
		{[]string{"--archive", archive, "--run", "x"}, 2, "--run: is of a store"},
		{[]string{"--sign", private}, 2, "are for an archive"},
		{[]string{"--archive", archive, "--samples", "0"}, 2, "--samples: 0"},
		{[]string{"--archive", archive + ".gone"}, 2, "--archive: "},
		{[]string{archive + ".gone", "--archive", archive}, 2, "signs.tar.gone"},
	} {
		var stdout, stderr strings.Builder
		status := Execute(t.Context(), append([]string{"prove"}, of.args...), strings.NewReader(""), &stdout, &stderr)
		if status != of.status || !strings.HasSuffix(stdout.String(), of.want) &&
			!strings.Contains(stderr.String(), of.want) {
			t.Errorf("%q: status %d\n%s%s", of.args, status, &stdout, &stderr)
		}
	}
	var stdout, stderr strings.Builder
	args := append([]string{"prove", "--json"}, links...)
	status := Execute(t.Context(), args, strings.NewReader(""), &stdout, &stderr)
	var r prove.Report
	err = json.Unmarshal([]byte(stdout.String()), &r)
	if err != nil || status != 0 || !r.Proved || len(r.Links) != 10 {
		t.Errorf("status %d: %v\n%s%s", status, err, &stdout, &stderr)
	}
}
