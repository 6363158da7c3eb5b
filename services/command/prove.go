package command

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/export"
	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/prove"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/verify"
)

// provingCommand is one prove command.
type provingCommand struct {
	*app
	run      schemas.Run
	services services
	options  prove.Options
	signer   ed25519.PrivateKey // of Sign
	signedBy ed25519.PublicKey  // of Signed
	Archive  string             `key:"archive" help:"file of 'meander runs export' to prove by, without a server; default what is stored of --run"`
	Trainer  string             `key:"trainer" help:"command that makes an update again, such as meander-train: without it updates are left out"`
	Links    string             `key:"links" help:"only these links, with commas; default all"`
	Sign     string             `key:"sign" help:"PEM file of an ed25519 key: what is proved is signed with it, into ARCHIVE.sig"`
	Signed   string             `key:"signed" help:"PEM file of a public ed25519 key: ARCHIVE.sig must be signed with its key"`
	Samples  int                `key:"samples" range:"1.." help:"samples of the batch that are computed again, in whole groups"`
	All      bool               `key:"all" help:"compute all samples again, of all updates back to the checkpoint"`
	Passes   float64            `key:"tolerance" range:"0.." help:"largest |ratio-1| that passes, and share of an update's step; more than 0 only where another build, backend or processor made them"`
}

// proveCommand makes the command 'meander prove'.
func proveCommand(a *app) *cobra.Command {
	p := &provingCommand{app: a, services: defaultServices(), Samples: 8}
	p.options.Verify = verify.Options{Compute: models.Compute{Device: devices.Auto, DType: devices.Auto}}
	c := &cobra.Command{
		Use:   "prove [ADAPTER|VERSION]",
		Short: "walk from trained weights back to their prompts, and compute each link again",
		Long: `prove finds the update that made an adapter (a file or a folder), a version of the weights, or the newest,
and walks back: weights, updates, batch, trajectories, rewards, advantages, requests, prompts. It says of
each link whether it holds, is broken, or cannot be checked and why.

  archive       each byte is what was written
  weights       the adapter's files give the digest of the version
  chain         each update began with the weights of the one before, the first with the checkpoint
  batch         samples, rewards and advantages give the digest that the update names
  trajectories  steps, digests and log-probs, as 'meander verify' computes them
  sums          rewards are the weighted sums of their scores, and those of the groups' results
  ratings       scores of whole groups are those of the stored answers
  selections    rewards at steps are the sums of their scores, and the rule ends the samples that ended by them
  rewards       the samples are scored again
  advantages    the groups are closed again, with the stored rewards
  prompts       the requests are made again out of the prompts
  update        the trainer (--trainer) makes the update again, to the bit
  signature     archive and weights are signed with a key (--signed)

It reads an archive (--archive), or what is stored of a run. The first --samples of the batch are computed
again; --all takes all, of all updates. Nothing is changed: it works in a folder of its own.

Exit status: 0 if each link that was asked for holds. 1 if one is broken or cannot be checked; the last
lines say which.`,
		Example: `  meander prove meander-out/learn/best --run learn
  meander prove 7 --archive night.tar --all --trainer meander-train
  meander prove --archive night.tar --links archive,weights,chain,batch
  meander prove ./adapter --archive night.tar --sign key.pem   # then: --signed key.pub.pem`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(c *cobra.Command, given []string) error {
			if err := errors.Join(p.check(given), p.readKeys(c.Flags())); err != nil {
				return usage(err)
			}
			if p.Archive != "" {
				return p.prove(c.Context(), c.OutOrStdout(), p.Archive)
			}
			return a.withRun(&p.run, func(c *cobra.Command, conn *connection, _ []string) error {
				if _, err := storedRun(c.Context(), conn.Bus, string(p.run)); err != nil {
					return err
				}
				folder, err := os.MkdirTemp("", "meander-prove-")
				if err != nil {
					return err
				}
				defer func() { _ = os.RemoveAll(folder) }()
				name := filepath.Join(folder, string(p.run)+".tar")
				if _, err := export.WriteArchiveFile(c.Context(), conn.Bus, p.run, name); err != nil {
					return err
				}
				return p.prove(c.Context(), c.OutOrStdout(), name)
			})(c, nil)
		},
	}
	c.Flags().StringVar((*string)(&p.options.Tenant), "tenant", "", "whose weights; default the only one with updates")
	c.Flags().StringVar((*string)(&p.options.Lane), "lane", "", "the weights' lane; default that of the newest update")
	nameFlag(c.Flags(), &p.run, "run", "", "stored run to prove by; default the latest")
	fields.Bind("", &p.options.Verify.Compute).Register(c.Flags())
	c.Flags().StringArrayVar(&p.options.Verify.Model, "model", nil,
		"model that made samples, where it is not shipped: a folder, once for each")
	p.services.bind().Register(c.Flags(), "scorers", "score_patience")
	flagsOf(c, p)
	return c
}

// check checks arguments and flags.
func (p *provingCommand) check(given []string) error {
	p.options.Version = -1
	if len(given) > 0 {
		if v, err := strconv.ParseInt(given[0], 10, 64); err == nil {
			p.options.Version = v
		} else {
			p.options.Adapter = given[0]
		}
	}
	p.options.Samples, p.options.All, p.options.Tolerance = p.Samples, p.All, p.Passes
	p.options.Trainer = strings.Fields(p.Trainer)
	for _, link := range strings.FieldsFunc(p.Links, func(r rune) bool { return r == ',' }) {
		if !slices.Contains(prove.Links(), link) {
			return oneOf("links", link, prove.Links())
		}
		p.options.Only = append(p.options.Only, link)
	}
	switch {
	case p.Archive != "" && p.run != "":
		return errors.New("--run: is of a store; an archive has its own: leave out --run or --archive")
	case p.Archive == "" && p.Sign+p.Signed != "":
		return errors.New("--sign, --signed: are for an archive; name it with --archive")
	}
	return errors.Join(checkCompute(p.options.Verify), p.services.validate())
}

// prove proves by an archive, in a store of its own, and prints the report.
func (p *provingCommand) prove(ctx context.Context, out io.Writer, name string) error {
	file, err := os.Open(name)
	if err != nil {
		return usage(fmt.Errorf("--archive: %w", err))
	}
	defer func() { _ = file.Close() }() // read-only
	folder, err := os.MkdirTemp("", "meander-prove-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	own := *p.app
	own.store, own.nats = folder, boot.NATS{}
	log := own.logger()
	conn, err := own.connect(ctx, log)
	if err != nil {
		return err
	}
	defer conn.Close()
	p.options.Reward, p.options.Advantage, p.options.Log = p.services.Reward, p.services.Advantage, log
	report, err := prove.Run(ctx, conn.Bus, name, file, p.options)
	if wrong, ok := errors.AsType[*prove.SettingError](err); ok {
		return usage(wrong)
	}
	if err != nil {
		return err
	}
	if err := p.signature(report); err != nil {
		return err
	}
	return p.print(out, report)
}

// print prints the links, and gives exit status 1 where not all hold.
func (p *provingCommand) print(out io.Writer, r *prove.Report) error {
	if p.json {
		if err := encode(out, r); err != nil {
			return err
		}
	} else {
		t := present.New("LINK", "OF", "", "WHAT")
		for _, l := range r.Links {
			t.Row(l.Link, l.Of, l.Verdict, l.What)
		}
		t.Print(out)
		fmt.Fprintf(out, "\nrun %s, weights %s, archive %s\n", present.OrDash(r.Run), present.OrDash(r.Weights),
			present.OrDash(r.Archive))
		if r.Proved {
			n := r.Count(prove.LeftOut)
			fmt.Fprintf(out, "proved%s\n", present.When(n > 0, "; left out: %d of %d links", n, len(r.Links)))
		}
		for _, fault := range r.Faults() {
			present.Lines(out, "not proved: "+fault)
		}
	}
	if !r.Proved {
		return &exitError{status: exitFailed}
	}
	return nil
}

// statement is what is signed: which archive, and which weights it proved.
type statement struct {
	Archive string `json:"archive"`
	Weights string `json:"weights"`
}

// signed is the file with a statement and its signature.
type signed struct {
	Statement statement `json:"statement"`
	Key       []byte    `json:"key"`
	Signature []byte    `json:"signature"`
}

// maxSignature is the size of a file with a signature, in bytes, above which it is none.
const maxSignature = 1 << 16

// signature adds whether what was proved is signed, which no other link says, and signs it.
func (p *provingCommand) signature(r *prove.Report) error {
	of, name := statement{r.Archive, r.Weights}, p.Archive+".sig"
	add := func(of, verdict, what string) {
		r.Links = append(r.Links, prove.Link{Link: "signature", Of: of, Verdict: verdict, What: what})
	}
	text, err := json.Marshal(of)
	if err != nil {
		return err
	}
	switch {
	case p.signedBy != nil:
		verdict, what := checkSignature(p.signedBy, name, of, text)
		add(name, verdict, what+" in "+p.Signed)
		r.Proved = r.Proved && verdict == prove.Holds
	case p.signer == nil:
		add("", prove.LeftOut, "no key is named (--signed): nothing holds times, names of samplers and processors, "+
			"metrics, and what a trainer tells")
	}
	if p.signer == nil || !r.Proved {
		return nil
	}
	public := p.signer.Public().(ed25519.PublicKey)
	data, err := json.Marshal(signed{of, public, ed25519.Sign(p.signer, text)})
	if err != nil {
		return err
	}
	if err := replaceFile(name, append(data, '\n')); err != nil {
		return err
	}
	add(name, prove.Holds, "archive and weights are signed now, with the key in "+p.Sign)
	return nil
}

// checkSignature says whether a file has a key's signature of a statement.
func checkSignature(key ed25519.PublicKey, name string, of statement, text []byte) (verdict, what string) {
	file, err := os.Open(name)
	if err != nil {
		return prove.Unchecked, fmt.Sprintf("%v: it is not signed with the key", err)
	}
	defer func() { _ = file.Close() }() // read-only
	data, err := io.ReadAll(io.LimitReader(file, maxSignature))
	if err != nil {
		return prove.Unchecked, fmt.Sprintf("%v: it is not signed with the key", err)
	}
	var s signed
	switch err := json.Unmarshal(data, &s); {
	case err != nil || s.Statement == statement{}:
		return prove.Broken, "the file is none that --sign writes: it is not signed with the key"
	case s.Statement != of:
		return prove.Broken, fmt.Sprintf("it names archive %.16s and weights %.16s: these are not signed with the key",
			s.Statement.Archive, s.Statement.Weights)
	case !ed25519.Verify(key, text, s.Signature):
		return prove.Broken, "the signature is not of the key"
	}
	return prove.Holds, "archive and weights are signed with the key"
}

// readKeys reads the keys that flags name, before anything is proved.
func (p *provingCommand) readKeys(flags *pflag.FlagSet) (err error) {
	if flags.Changed("sign") {
		p.signer, err = readKey[ed25519.PrivateKey](p.Sign, "an ed25519 key", x509.ParsePKCS8PrivateKey)
	}
	if err != nil {
		return fmt.Errorf("--sign: %w", err)
	}
	if flags.Changed("signed") {
		p.signedBy, err = readKey[ed25519.PublicKey](p.Signed, "a public ed25519 key", x509.ParsePKIXPublicKey)
	}
	if err != nil {
		return fmt.Errorf("--signed: %w", err)
	}
	return nil
}

// readKey reads a key of a PEM file, which must be what is asked for.
func readKey[K any](name, must string, parse func([]byte) (any, error)) (key K, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return key, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return key, fmt.Errorf("%s: no PEM file; openssl genpkey -algorithm ed25519 makes a key", name)
	}
	of, err := parse(block.Bytes)
	key, ok := of.(K)
	if err != nil || !ok {
		return key, fmt.Errorf("%s: is a %s; must be %s, without a passphrase", name, block.Type, must)
	}
	return key, nil
}
