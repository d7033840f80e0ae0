// Opens a model package of hatch-epcontext with ONNX Runtime 1.31 or newer.
// Tested on Linux, on the CPU and on QNN's simulator, with Mono and its calls of the C API.
// Not verified on .NET, on Windows or on hardware.
//
//     OrtEnv.Instance().RegisterExecutionProviderLibrary("QNNExecutionProvider", "onnxruntime_providers_qnn.dll");
//     using var session = ModelPackage.Open("digits_app/epcontext", "digits", "QNNExecutionProvider",
//         new Dictionary<string, string> { ["backend_type"] = "htp" });
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;

static class ModelPackage
{
    // A session of the variant that ONNX Runtime selects for the EP.
    // "start" holds the options without which the EP does not start.
    public static InferenceSession Open(
        string package, string model, string ep, Dictionary<string, string> start)
    {
        var env = OrtEnv.Instance();
        var devices = env.GetEpDevices().Where(device => device.EpName == ep).ToList();
        if (devices.Count == 0) throw new InvalidOperationException($"{ep} has no device here");

        string variant, folder;
        using (var choice = new SessionOptions())
        {
            choice.AppendExecutionProvider(env, devices, start);
            (variant, folder) = Select(env, choice, package, model);
        }

        // C# cannot take over a session of the C API, so open the selected file in the same way.
        using var manifest = JsonDocument.Parse(
            File.ReadAllText(Path.Combine(package, "manifest.json")));
        var ort = manifest.RootElement.GetProperty("components").GetProperty(model)
            .GetProperty("variants").GetProperty(variant)
            .GetProperty("executor_info").GetProperty("ort");
        using var options = new SessionOptions();
        foreach (var option in Options(ort, "session_options"))
            options.AddSessionConfigEntry(option.Key, option.Value);
        options.AppendExecutionProvider(env, devices, Options(ort, "provider_options"));
        return new InferenceSession(
            Path.Combine(folder, ort.GetProperty("model_file").GetString()), options);
    }

    static Dictionary<string, string> Options(JsonElement ort, string key) =>
        ort.TryGetProperty(key, out var options)
            ? options.EnumerateObject().ToDictionary(o => o.Name, o => o.Value.GetString())
            : new Dictionary<string, string>();

    [DllImport("onnxruntime")]
    static extern IntPtr OrtGetApiBase();

    delegate IntPtr GetApi(uint version);
    delegate IntPtr GetTable();
    delegate IntPtr GetText(IntPtr status);
    delegate void Release(IntPtr handle);
    delegate IntPtr Read(IntPtr handle, out IntPtr result);
    delegate IntPtr Create(IntPtr env, IntPtr options, out IntPtr result);
    delegate IntPtr SelectComponent(IntPtr package, IntPtr name, IntPtr options, out IntPtr result);

    // The C tables OrtApi and OrtModelPackageApi are stable: a function keeps its index.
    static T At<T>(IntPtr table, int index) =>
        Marshal.GetDelegateForFunctionPointer<T>(Marshal.ReadIntPtr(table, index * IntPtr.Size));

    static (string Variant, string Folder) Select(
        OrtEnv env, SessionOptions options, string package, string model)
    {
        var api = At<GetApi>(OrtGetApiBase(), 0)(31);
        if (api == IntPtr.Zero) throw new NotSupportedException("needs ONNX Runtime 1.31");
        var table = At<GetTable>(api, 427)();
        var windows = RuntimeInformation.IsOSPlatform(OSPlatform.Windows);
        IntPtr choice = default, opened = default, selected = default;
        var path = windows
            ? Marshal.StringToCoTaskMemUni(package) : Marshal.StringToCoTaskMemUTF8(package);
        var name = Marshal.StringToCoTaskMemUTF8(model);
        try
        {
            Check(api, At<Create>(table, 0)(
                env.DangerousGetHandle(), options.DangerousGetHandle(), out choice));
            Check(api, At<Read>(table, 2)(path, out opened));
            Check(api, At<SelectComponent>(table, 11)(opened, name, choice, out selected));
            Check(api, At<Read>(table, 13)(selected, out var variant));
            Check(api, At<Read>(table, 14)(selected, out var folder));
            return (
                Marshal.PtrToStringUTF8(variant),
                windows ? Marshal.PtrToStringUni(folder) : Marshal.PtrToStringUTF8(folder));
        }
        finally
        {
            At<Release>(table, 12)(selected);
            At<Release>(table, 3)(opened);
            At<Release>(table, 1)(choice);
            Marshal.FreeCoTaskMem(name);
            Marshal.FreeCoTaskMem(path);
        }
    }

    static void Check(IntPtr api, IntPtr status)
    {
        if (status == IntPtr.Zero) return;
        var message = Marshal.PtrToStringUTF8(At<GetText>(api, 2)(status));
        At<Release>(api, 93)(status);
        throw new InvalidOperationException(message);
    }
}
